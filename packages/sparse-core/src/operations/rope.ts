import type { DType, FloatDType } from '../dtype.js';
import { ShapeError } from '../errors.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';
import { describe } from '../tensor.js';
import { expectThat, isFinite32 } from '../validate.js';
import { type RopeConvention, ropeConventions } from './rope-description.js';

/** How heads turn by their positions. */
export interface RopeTurn {
  /** `[token]`, the true positions in the sequence; they need not follow each other. */
  readonly positions: TensorHandle<'i32', readonly ['token']>;
  /** `[pair]`, radians a position; `2 * pair <= dim`, and the dims behind the pairs stay as they are. */
  readonly inverseFrequencies: TensorHandle<'f32', readonly ['pair']>;
  readonly convention: RopeConvention;
  /** Multiplies every cosine and sine. Default: 1. */
  readonly attentionScale?: number | undefined;
}

export interface RopeArguments<D extends FloatDType, A extends readonly ['token', string, 'dim']> extends RopeTurn {
  /** `[token, head, dim]`: queries or keys. */
  readonly input: TensorHandle<D, A>;
  /** The shape and dtype of `input`; may be the input itself. */
  readonly output: TensorHandle<D, A>;
}

const enqueue = operation(
  'rope',
  [
    { name: 'input', dtype: floats, shape: ['token', 'head', 'dim'], layout: 'rows' },
    { name: 'positions', dtype: ['i32'], shape: ['token'], layout: 'rows' },
    { name: 'inverseFrequencies', dtype: ['f32'], shape: ['pair'], layout: 'rows' },
    { name: 'output', dtypeOf: 'input', shape: ['token', 'head', 'dim'], layout: 'rows', inPlaceOf: ['input'] },
  ],
  ['output'],
);

/**
 * Rotary position embedding (Su et al. 2021, eq. 34). Pair i of each head at position m turns by the angle
 * `m * inverseFrequencies[i]`: `(a, b)` becomes `(a cos - b sin, b cos + a sin) * attentionScale`.
 * Angles are taken in f64, so that far positions stay exact; the rotation is in f32.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function rope<D extends FloatDType, A extends readonly ['token', string, 'dim']>(
  stream: Stream,
  args: RopeArguments<D, A>,
): void {
  enqueue(stream, args, (natives, [input, , inverseFrequencies]) => {
    expectTurn('rope', args, input, inverseFrequencies);
    loadAddon().rope(stream.native, ...natives, args.convention === 'interleaved', args.attentionScale ?? 1);
  });
}

/**
 * Checks what the rules of `rows` and `inverseFrequencies` leave open.
 * @throws ShapeError, InvalidValueError
 */
export function expectTurn(
  operation: string,
  { convention, attentionScale = 1 }: RopeTurn,
  rows: TensorHandle<DType, readonly [string, string, string]>,
  inverseFrequencies: TensorHandle<DType, readonly [string]>,
): void {
  if (2 * inverseFrequencies.shape[0] > rows.shape[2]) {
    throw new ShapeError(
      `${operation}: inverseFrequencies is ${describe(inverseFrequencies)} for heads of ${describe(rows)}; ` +
        'two dims turn at each frequency, so give at most dim / 2 frequencies.',
      { subject: 'inverseFrequencies', given: inverseFrequencies.shape[0], wanted: rows.shape[2] / 2 },
    );
  }
  expectThat(operation, 'convention', convention, ropeConventions.includes(convention), ropeConventions.join(' or '));
  expectThat(operation, 'attentionScale', attentionScale, isFinite32(attentionScale), 'a finite f32');
}
