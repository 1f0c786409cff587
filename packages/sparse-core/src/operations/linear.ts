import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats, type TensorRule } from '../tensor-rules.js';
import { expectBoolean, expectObject, listOf } from '../validate.js';

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
  /**
   * i32 `[1]`: how many of the first rows are wanted, known when the layer runs. The CPU computes these as if there were no
   * others; CUDA, where a few rows cost what one does, computes all. What the others' outputs then hold is undefined.
   */
  readonly rows?: TensorHandle<'i32', readonly [string]> | undefined;
  /** Adds to what `output` holds, as a residual connection does. False unless given. */
  readonly accumulate?: boolean | undefined;
}

/** One layer, or several that read the same input and so run together. */
export type LinearArguments<D extends FloatDType, Token extends string> = LinearInput<D, Token> &
  (LinearLayer<D, Token> | { readonly layers: readonly LinearLayer<D, Token>[] });

/** What is demanded of the tensors of `layers[layer]`, or of the only layer. */
function layerRules(layer?: number) {
  const name = (tensor: string) => (layer === undefined ? tensor : `layers.${layer}.${tensor}`);
  const out = `out ${layer ?? ''}`;
  return [
    { name: name('weight'), dtype: floats, shape: [out, 'in'], layout: 'rows' },
    { name: name('bias'), dtype: floats, shape: [out], layout: 'rows', optional: true },
    { name: name('output'), dtypeOf: 'input', shape: ['token', out], layout: 'rows' },
  ] as const satisfies readonly TensorRule[];
}

function linearOf(layers: readonly ReturnType<typeof layerRules>[]) {
  const input = { name: 'input', dtype: floats, shape: ['token', 'in'], layout: 'rows' } as const;
  const outputs = layers.map(([, , output]) => output.name);
  const rows = { name: 'rows', dtype: ['i32'], shape: [1], layout: 'rows', optional: true } as const;
  return operation('linear', [input, rows, ...layers.flat()], outputs);
}

const mostLayers = 64;
const single = linearOf([layerRules()]);
/** By the number of layers, made when first called. */
const several: ReturnType<typeof linearOf>[] = [];

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
  enqueueOf(args)(stream, args, ([input, rows, ...layers]) => {
    const { accumulate = false } = args;
    expectBoolean('linear', 'accumulate', accumulate);
    loadAddon().linear(stream.native, input, rows, accumulate, ...layers);
  });
}

function enqueueOf(args: object): typeof single {
  expectObject('linear', 'the arguments', args);
  if (!('layers' in args)) return single;
  const count = listOf('linear', 'layers', args.layers as readonly unknown[], mostLayers).length;
  several[count] ??= linearOf(Array.from({ length: count }, (_, layer) => layerRules(layer)));
  return several[count];
}
