import type { FloatDType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

export interface LinearArguments<D extends FloatDType, Token extends string> {
  /** `[token, in]` */
  readonly input: TensorHandle<D, readonly [Token, string]>;
  /** `[out, in]`, as model files store it; read in place, whatever its dtype. */
  readonly weight: TensorHandle<FloatDType, readonly [string, string]>;
  /** `[out]`, added to every row. */
  readonly bias?: TensorHandle<FloatDType, readonly [string]> | undefined;
  /** `[token, out]`, the dtype of `input`; shares no memory with it. */
  readonly output: TensorHandle<D, readonly [Token, string]>;
  /** Adds to what `output` holds, as a residual connection does. False unless given. */
  readonly accumulate?: boolean | undefined;
}

/**
 * A linear layer: `output[t, o] = sum_i input[t, i] * weight[o, i] (+ bias[o]) (+ output[t, o])`.
 * Products are summed in f32. The sum of a row does not depend on the number of threads; in a batch of few
 * rows its terms are added in another order than in a batch of many (docs/ops/linear.md says where and by how
 * much the results may differ).
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function linear<D extends FloatDType, Token extends string>(
  stream: Stream,
  args: LinearArguments<D, Token>,
): void {
  const { input, weight, bias, output, accumulate = false } = args;
  const native = {
    input: nativeOf('linear', 'input', input, stream).native,
    weight: nativeOf('linear', 'weight', weight, stream).native,
    bias: bias && nativeOf('linear', 'bias', bias, stream).native,
    output: nativeOf('linear', 'output', output, stream),
  };
  expectDType('linear', 'input', input, ['f32', 'f16', 'bf16']);
  expectDType('linear', 'weight', weight, ['f32', 'f16', 'bf16']);
  expectDType('linear', 'output', output, [input.dtype]);
  expectShape('linear', 'input', input, [undefined, undefined]);
  expectShape('linear', 'weight', weight, [undefined, input.shape[1]]);
  expectShape('linear', 'output', output, [input.shape[0], weight.shape[0]]);
  for (const [name, tensor] of Object.entries({ input, weight, output })) expectContiguousRows('linear', name, tensor);
  if (bias) {
    expectDType('linear', 'bias', bias, ['f32', 'f16', 'bf16']);
    expectShape('linear', 'bias', bias, [weight.shape[0]]);
    expectContiguousRows('linear', 'bias', bias);
  }
  loadAddon().linear(stream.native, native.input, native.weight, native.bias, native.output.native, accumulate);
  native.output.writtenBy(stream);
}
