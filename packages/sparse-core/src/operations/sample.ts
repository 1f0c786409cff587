import { InvalidValueError, ShapeError } from '../errors.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

/** How one row is sampled. The settings apply in the order in which they stand here. */
export interface SampleSettings {
  /** Divides the positive logits of recent tokens and multiplies the negative ones. Default: 1, none. */
  readonly repetitionPenalty?: number | undefined;
  /** Divides the logits. 0 takes the greatest, and the settings below do nothing. Default: 1. */
  readonly temperature?: number | undefined;
  /** Keeps this many tokens. Default: all. */
  readonly topK?: number | undefined;
  /** Keeps tokens while the likelier ones hold less than this probability. In (0, 1]. Default: 1, all. */
  readonly topP?: number | undefined;
  /** Keeps tokens that are at least this fraction as likely as the likeliest. In [0, 1]. Default: 0, all. */
  readonly minP?: number | undefined;
  /** A whole number. Default: 0. */
  readonly seed?: number | undefined;
}

export interface SampleArguments {
  /** `[row, vocabulary]` */
  readonly logits: TensorHandle<'f32', readonly ['row', 'vocabulary']>;
  /** One for each row. */
  readonly settings: readonly SampleSettings[];
  /** One whole number for each row, such as its token's position: every draw of one seed has its own. */
  readonly steps: readonly number[];
  /** `[row, recent]`, the tokens to penalise, padded with -1. Needed when a row has a repetition penalty. */
  readonly recent?: TensorHandle<'i32', readonly ['row', 'recent']> | undefined;
  /** `[row]`, the chosen tokens. */
  readonly output: TensorHandle<'i32' | 'u32', readonly ['row']>;
  /**
   * i32 `[row]`, why a row has no token: an index into `sampleOutcomes`, 0 for one that has a token. Such a row's output
   * is -1 (as u32, 2^32 - 1), and the stream and the other rows go on. Default: such a row fails the stream.
   */
  readonly outcomes?: TensorHandle<'i32', readonly ['row']> | undefined;
}

/** Why a row has no token, by its number in `outcomes`. */
export const sampleOutcomes = [
  'it has a token',
  "a score is NaN or infinite; the model's output is broken",
  'every logit is -infinity; leave at least one token possible',
  'a recent token is not one of the vocabulary',
] as const;

/**
 * Chooses the next token of each row: repetition penalty, temperature, top-k, top-p, min-p, in this order as
 * in the `transformers` library, then a draw. A row's logits, settings and step decide it alone, whatever the
 * other rows are; ties break by lower index.
 * Logits that are NaN or +infinity, a row without a finite one, and recent tokens outside the vocabulary fail
 * the stream with an InvalidValueError, or with `outcomes` their own row only.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function sample(stream: Stream, args: SampleArguments): void {
  const { logits, settings, steps, recent, output, outcomes } = args;
  const native = {
    logits: nativeOf('sample', 'logits', logits, stream).native,
    recent: recent === undefined ? undefined : nativeOf('sample', 'recent', recent, stream).native,
    output: nativeOf('sample', 'output', output, stream),
    outcomes: outcomes === undefined ? undefined : nativeOf('sample', 'outcomes', outcomes, stream),
  };
  expectDType('sample', 'logits', logits, ['f32']);
  expectDType('sample', 'output', output, ['i32', 'u32']);
  expectShape('sample', 'logits', logits, [undefined, undefined]);
  const [rows, vocabulary] = logits.shape;
  if (vocabulary === 0) {
    throw new ShapeError('sample: logits has an empty vocabulary; there is nothing to choose from.', {
      subject: 'logits',
      given: logits.shape,
    });
  }
  expectShape('sample', 'output', output, [rows]);
  expectContiguousRows('sample', 'logits', logits);
  expectContiguousRows('sample', 'output', output);
  if (outcomes !== undefined) {
    expectDType('sample', 'outcomes', outcomes, ['i32']);
    expectShape('sample', 'outcomes', outcomes, [rows]);
    expectContiguousRows('sample', 'outcomes', outcomes);
  }
  if (recent !== undefined) {
    expectDType('sample', 'recent', recent, ['i32']);
    expectShape('sample', 'recent', recent, [rows, undefined]);
    expectContiguousRows('sample', 'recent', recent);
  }
  for (const [name, given] of Object.entries({ settings, steps })) {
    if (given.length === rows) continue;
    throw new ShapeError(
      `sample: ${name} has ${given.length} entries for ${rows} rows; give one for each row.`,
      {
        subject: name,
        given: given.length,
        wanted: rows,
      },
    );
  }
  const numbers = settings.flatMap((each, row) => settingNumbers(each, steps[row], recent !== undefined));
  const packed = Float64Array.from(numbers);
  loadAddon().sample(
    stream.native,
    native.logits,
    native.recent,
    native.output.native,
    packed,
    native.outcomes?.native,
  );
  native.output.writtenBy(stream);
  native.outcomes?.writtenBy(stream);
}

/** One row's settings in the order that the addon reads them. */
function settingNumbers(settings: SampleSettings, step: number | undefined, hasRecent: boolean): number[] {
  const { repetitionPenalty = 1, temperature = 1, topK, topP = 1, minP = 0, seed = 0 } = settings;
  const [storedTemperature, storedPenalty] = [Math.fround(temperature), Math.fround(repetitionPenalty)];
  const validTemperature = temperature === 0 || (storedTemperature > 0 && storedTemperature < Infinity);
  expect('temperature', temperature, validTemperature, '0 or a positive f32');
  const validPenalty = storedPenalty > 0 && storedPenalty < Infinity;
  expect('repetitionPenalty', repetitionPenalty, validPenalty, 'a positive f32');
  const usablePenalty = repetitionPenalty === 1 || hasRecent;
  expect('repetitionPenalty', repetitionPenalty, usablePenalty, '1 unless recent is given');
  const validTopK = topK === undefined || (Number.isSafeInteger(topK) && topK > 0);
  expect('topK', topK, validTopK, 'a positive whole number');
  expect('topP', topP, topP > 0 && topP <= 1, 'more than 0 and at most 1');
  expect('minP', minP, minP >= 0 && minP <= 1, 'from 0 to 1');
  expect('seed', seed, Number.isSafeInteger(seed) && seed >= 0, 'a whole number from 0 to 2^53 - 1');
  const whole = step !== undefined && Number.isSafeInteger(step) && step >= 0;
  expect('steps', step, whole, 'whole numbers from 0 to 2^53 - 1');
  return [temperature, topK ?? 0, topP, minP, repetitionPenalty, seed, step ?? NaN];
}

function expect(name: string, given: number | undefined, holds: boolean, wanted: string): void {
  if (holds) return;
  throw new InvalidValueError(`sample: ${name} is ${String(given)}; it must be ${wanted}.`, {
    subject: name,
    given,
    wanted,
  });
}
