import type { FloatDType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import { fromNative } from '../native-error.js';
import type { Stream } from '../stream.js';
import type { Tensor, TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

export interface LinearLayer<D extends FloatDType, Token extends string> {
  /** `[out, in]`, as model files store it; read in place, whatever its dtype. */
  readonly weight: TensorHandle<FloatDType, readonly [string, string]>;
  /** `[out]`, added to every row. */
  readonly bias?: TensorHandle<FloatDType, readonly [string]> | undefined;
  /** `[token, out]`, the dtype of the input; shares no memory with it, nor with another layer's output. */
  readonly output: TensorHandle<D, readonly [Token, string]>;
}

interface LinearInput<D extends FloatDType, Token extends string> {
  /** `[token, in]` */
  readonly input: TensorHandle<D, readonly [Token, string]>;
  /** Adds to what `output` holds, as a residual connection does. False unless given. */
  readonly accumulate?: boolean | undefined;
}

/** One layer, or several that read the same input and so run together. */
export type LinearArguments<D extends FloatDType, Token extends string> = LinearInput<D, Token> &
  (LinearLayer<D, Token> | { readonly layers: readonly LinearLayer<D, Token>[] });

/**
 * A linear layer: `output[t, o] = sum_i input[t, i] * weight[o, i] (+ bias[o]) (+ output[t, o])`, or several of the
 * same input, whose results are those of one call each: `layers: [query, key, value]`.
 * Products are summed in f32. The sum of a row does not depend on the number of threads; in a batch of few
 * rows its terms are added in another order than in a batch of many (docs/ops/linear.md says where and by how
 * much the results may differ).
 * @throws ShapeError, DTypeError, DeviceError, DisposedError; InvalidValueError when an output shares memory with the
 * input or another output
 */
export function linear<D extends FloatDType, Token extends string>(
  stream: Stream,
  args: LinearArguments<D, Token>,
): void {
  const { input, accumulate = false } = args;
  const nativeInput = nativeOf('linear', 'input', input, stream).native;
  expectDType('linear', 'input', input, ['f32', 'f16', 'bf16']);
  expectShape('linear', 'input', input, [undefined, undefined]);
  expectContiguousRows('linear', 'input', input);
  const layers = ('layers' in args ? args.layers : [args]).map((layer) => nativeLayer(stream, input, layer));
  const natives = layers.flatMap(({ weight, bias, output }) => [weight.native, bias?.native, output.native]);
  try {
    loadAddon().linear(stream.native, nativeInput, accumulate, ...natives);
  } catch (error) {
    throw fromNative(error, { subject: 'linear' });
  }
  for (const { output } of layers) output.writtenBy(stream);
}

/** The tensors of a layer that fits the input. */
function nativeLayer<D extends FloatDType, Token extends string>(
  stream: Stream,
  input: TensorHandle<D, readonly [Token, string]>,
  { weight, bias, output }: LinearLayer<D, Token>,
): { weight: Tensor; bias: Tensor | undefined; output: Tensor } {
  const native = {
    weight: nativeOf('linear', 'weight', weight, stream),
    bias: bias && nativeOf('linear', 'bias', bias, stream),
    output: nativeOf('linear', 'output', output, stream),
  };
  expectDType('linear', 'weight', weight, ['f32', 'f16', 'bf16']);
  expectDType('linear', 'output', output, [input.dtype]);
  expectShape('linear', 'weight', weight, [undefined, input.shape[1]]);
  expectShape('linear', 'output', output, [input.shape[0], weight.shape[0]]);
  expectContiguousRows('linear', 'weight', weight);
  expectContiguousRows('linear', 'output', output);
  if (bias) {
    expectDType('linear', 'bias', bias, ['f32', 'f16', 'bf16']);
    expectShape('linear', 'bias', bias, [weight.shape[0]]);
    expectContiguousRows('linear', 'bias', bias);
  }
  return native;
}
