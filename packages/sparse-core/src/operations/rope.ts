import type { FloatDType } from '../dtype.js';
import { InvalidValueError, ShapeError } from '../errors.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import { describe, type TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';
import { type RopeConvention, ropeConventions } from './rope-description.js';

export interface RopeArguments<D extends FloatDType, A extends readonly ['token', string, 'dim']> {
  /** `[token, head, dim]`: queries or keys. */
  readonly input: TensorHandle<D, A>;
  /** `[token]`, the true positions in the sequence; they need not follow each other. */
  readonly positions: TensorHandle<'i32', readonly ['token']>;
  /** `[pair]`, radians a position; `2 * pair <= dim`, and the dims behind the pairs stay as they are. */
  readonly inverseFrequencies: TensorHandle<'f32', readonly ['pair']>;
  /** The shape and dtype of `input`; may be the input itself. */
  readonly output: TensorHandle<D, A>;
  readonly convention: RopeConvention;
  /** Multiplies every cosine and sine. Default: 1. */
  readonly attentionScale?: number | undefined;
}

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
  const { input, positions, inverseFrequencies, output, convention, attentionScale = 1 } = args;
  const native = {
    input: nativeOf('rope', 'input', input, stream).native,
    positions: nativeOf('rope', 'positions', positions, stream).native,
    inverseFrequencies: nativeOf('rope', 'inverseFrequencies', inverseFrequencies, stream).native,
    output: nativeOf('rope', 'output', output, stream),
  };
  expectDType('rope', 'input', input, ['f32', 'f16', 'bf16']);
  expectDType('rope', 'positions', positions, ['i32']);
  expectDType('rope', 'inverseFrequencies', inverseFrequencies, ['f32']);
  expectDType('rope', 'output', output, [input.dtype]);
  expectShape('rope', 'input', input, [undefined, undefined, undefined]);
  expectShape('rope', 'positions', positions, [input.shape[0]]);
  expectShape('rope', 'inverseFrequencies', inverseFrequencies, [undefined]);
  expectShape('rope', 'output', output, input.shape);
  const tensors = { input, positions, inverseFrequencies, output };
  for (const [name, tensor] of Object.entries(tensors)) expectContiguousRows('rope', name, tensor);
  if (2 * inverseFrequencies.shape[0] > input.shape[2]) {
    throw new ShapeError(
      `rope: inverseFrequencies is ${describe(inverseFrequencies)} and input is ${describe(input)}; ` +
        'two dims turn at each frequency, so give at most dim / 2 frequencies.',
      { subject: 'inverseFrequencies', given: inverseFrequencies.shape[0], wanted: input.shape[2] / 2 },
    );
  }
  if (!ropeConventions.includes(convention)) {
    throw new InvalidValueError(`rope: convention is '${convention}'; use ${ropeConventions.join(' or ')}.`, {
      subject: 'convention',
      given: convention,
      wanted: ropeConventions,
    });
  }
  if (!Number.isFinite(attentionScale)) {
    throw new InvalidValueError(`rope: attentionScale is ${attentionScale}; it must be finite.`, {
      subject: 'attentionScale',
      given: attentionScale,
    });
  }
  loadAddon().rope(
    stream.native,
    native.input,
    native.positions,
    native.inverseFrequencies,
    native.output.native,
    convention === 'interleaved',
    attentionScale,
  );
  native.output.writtenBy(stream);
}
