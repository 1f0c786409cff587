import type { FloatDType } from '../dtype.js';
import { InvalidValueError, ShapeError } from '../errors.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import { type Axes, describe, type TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

export interface RmsNormArguments<D extends FloatDType, A extends Axes> {
  /** `[..., feature]`, two or three axes. */
  readonly input: TensorHandle<D, A>;
  /** `[feature]` */
  readonly weight: TensorHandle<FloatDType, readonly [string]>;
  /** The shape and dtype of `input`; may be the input itself. */
  readonly output: TensorHandle<D, A>;
  /** Added to the mean square. Positive. */
  readonly epsilon: number;
}

/**
 * Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019, eq. 4):
 * `output[r, i] = input[r, i] / sqrt(mean_j input[r, j]^2 + epsilon) * weight[i]`.
 * The mean is taken in f32.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function rmsNorm<D extends FloatDType, A extends Axes>(stream: Stream, args: RmsNormArguments<D, A>): void {
  const { input, weight, output, epsilon } = args;
  const natives = [
    nativeOf('rmsNorm', 'input', input, stream),
    nativeOf('rmsNorm', 'weight', weight, stream),
    nativeOf('rmsNorm', 'output', output, stream),
  ] as const;
  if (input.shape.length !== 2 && input.shape.length !== 3) {
    throw new ShapeError(`rmsNorm: input is ${describe(input)}; it must have two or three axes.`, {
      subject: 'input',
      given: input.shape,
    });
  }
  expectDType('rmsNorm', 'input', input, ['f32', 'f16', 'bf16']);
  expectDType('rmsNorm', 'weight', weight, ['f32', 'f16', 'bf16']);
  expectDType('rmsNorm', 'output', output, [input.dtype]);
  expectShape('rmsNorm', 'weight', weight, [input.shape.at(-1)]);
  expectShape('rmsNorm', 'output', output, input.shape);
  for (const [name, tensor] of Object.entries({ input, weight, output })) expectContiguousRows('rmsNorm', name, tensor);
  if (!(epsilon > 0)) {
    throw new InvalidValueError(`rmsNorm: epsilon is ${epsilon}; it must be positive.`, {
      subject: 'epsilon',
      given: epsilon,
    });
  }
  loadAddon().rmsNorm(stream.native, natives[0].native, natives[1].native, natives[2].native, epsilon);
  natives[2].writtenBy(stream);
}
