import { ShapeError } from '../errors.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { expectOptions, expectThat, listFor } from '../validate.js';

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

const enqueue = operation(
  'sample',
  [
    { name: 'logits', dtype: ['f32'], shape: ['row', 'vocabulary'], layout: 'rows' },
    { name: 'recent', dtype: ['i32'], shape: ['row', 'recent'], layout: 'rows', optional: true },
    { name: 'output', dtype: ['i32', 'u32'], shape: ['row'], layout: 'rows' },
    { name: 'outcomes', dtype: ['i32'], shape: ['row'], layout: 'rows', optional: true },
  ],
  ['output', 'outcomes'],
);

/**
 * Chooses the next token of each row: repetition penalty, temperature, top-k, top-p, min-p, in this order as
 * in the `transformers` library, then a draw. A row's logits, settings and step decide it alone, whatever the
 * other rows are; ties break by lower index.
 * Logits that are NaN or +infinity, a row without a finite one, and recent tokens outside the vocabulary fail
 * the stream with an InvalidValueError, or with `outcomes` their own row only.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function sample(stream: Stream, args: SampleArguments): void {
  enqueue(stream, args, ([logits, recent, output, outcomes], [{ shape }]) => {
    const [rows, vocabulary] = shape;
    if (vocabulary === 0) {
      throw new ShapeError('sample: logits has an empty vocabulary; there is nothing to choose from.', {
        subject: 'logits',
        given: shape,
      });
    }
    const settings = listFor('sample', 'settings', args.settings, 'row', rows);
    const steps = listFor('sample', 'steps', args.steps, 'row', rows);
    const numbers = settings.flatMap((each, row) => settingNumbers(each, steps[row], recent !== undefined));
    loadAddon().sample(stream.native, logits, recent, output, Float64Array.from(numbers), outcomes);
  });
}

/** @throws InvalidValueError unless a row can be sampled by these settings, whatever its logits are */
export function expectSampleSettings(settings: SampleSettings): void {
  settingNumbers(settings, 0, true);
}

/** One row's settings in the order that the addon reads them. */
function settingNumbers(settings: SampleSettings, step: number | undefined, hasRecent: boolean): number[] {
  expectOptions('sample', settings, { repetitionPenalty: true, temperature: true, topK: true, topP: true, minP: true, seed: true });
  const { repetitionPenalty = 1, temperature = 1, topK, topP = 1, minP = 0, seed = 0 } = settings;
  const [storedTemperature, storedPenalty] = [float32(temperature), float32(repetitionPenalty)];
  const validTemperature = temperature === 0 || (storedTemperature > 0 && storedTemperature < Infinity);
  expect('temperature', temperature, validTemperature, '0 or a positive f32');
  const validPenalty = storedPenalty > 0 && storedPenalty < Infinity;
  expect('repetitionPenalty', repetitionPenalty, validPenalty, 'a positive f32');
  const usablePenalty = repetitionPenalty === 1 || hasRecent;
  expect('repetitionPenalty', repetitionPenalty, usablePenalty, '1 unless recent is given');
  const validTopK = topK === undefined || (Number.isSafeInteger(topK) && topK > 0);
  expect('topK', topK, validTopK, 'a positive whole number');
  expect('topP', topP, Number.isFinite(topP) && topP > 0 && topP <= 1, 'more than 0 and at most 1');
  expect('minP', minP, Number.isFinite(minP) && minP >= 0 && minP <= 1, 'from 0 to 1');
  expect('seed', seed, Number.isSafeInteger(seed) && seed >= 0, 'a whole number from 0 to 2^53 - 1');
  const whole = step !== undefined && Number.isSafeInteger(step) && step >= 0;
  expect('steps', step, whole, 'whole numbers from 0 to 2^53 - 1');
  return [temperature, topK ?? 0, topP, minP, repetitionPenalty, seed, step ?? NaN];
}

/** The number as the kernels keep it; NaN for what is none. */
function float32(given: unknown): number {
  return typeof given === 'number' ? Math.fround(given) : NaN;
}

function expect(name: string, given: unknown, holds: boolean, wanted: string): void {
  expectThat('sample', name, given, holds, wanted);
}
