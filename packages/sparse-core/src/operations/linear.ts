import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats, type TensorRule } from '../tensor-rules.js';
import { expectBoolean, expectObject, expectThat, listOf } from '../validate.js';

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
  /**
   * Of two layers of one size: the first gates the second as `swiglu` does, with the same bits. `layers[0].output` becomes
   * `silu(itself) * layers[1].output`; what `layers[1].output` then holds is undefined. False unless given.
   */
  readonly swiglu?: boolean | undefined;
}

/** One layer, or several that read the same input and so run together. */
export type LinearArguments<D extends FloatDType, Token extends string> = LinearInput<D, Token> &
  (LinearLayer<D, Token> | { readonly layers: readonly LinearLayer<D, Token>[] });

/** What is demanded of the tensors of `layers[layer]`, or of the only layer. */
function layerRules(layer?: number, out = `out ${layer ?? ''}`) {
  const name = (tensor: string) => (layer === undefined ? tensor : `layers.${layer}.${tensor}`);
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
/** Two layers of one size, of which one gates the other. */
const gated = linearOf([layerRules(0, 'out'), layerRules(1, 'out')]);
/** By the number of layers, made when first called. */
const several: ReturnType<typeof linearOf>[] = [];

/**
 * A linear layer: `output[t, o] = sum_i input[t, i] * weight[o, i] (+ bias[o]) (+ output[t, o])`, or several of the
 * same input, whose results are those of one call each: `layers: [query, key, value]`. (With cuBLASLt to within rounding, where
 * their weights and outputs lie behind one another.)
 * Products are summed in f32. The sum of a row does not depend on the number of threads; in a batch of few
 * rows its terms are added in another order than in a batch of many (docs/ops/linear.md says where and by how
 * much the results may differ). With `swiglu` the first of two layers gates the second (Shazeer 2020, eq. 6).
 * @throws ShapeError, DTypeError, DeviceError, DisposedError; InvalidValueError when an output shares memory with the
 * input or another output, and for `swiglu` of another number of layers than two, or with `accumulate`
 */
export function linear<D extends FloatDType, Token extends string>(
  stream: Stream,
  args: LinearArguments<D, Token>,
): void {
  enqueueOf(args)(stream, args, ([input, rows, ...layers]) => {
    const { accumulate = false, swiglu = false } = args;
    expectBoolean('linear', 'accumulate', accumulate);
    expectThat('linear', 'accumulate', accumulate, !(accumulate && swiglu), 'false, where swiglu is true');
    loadAddon().linear(stream.native, input, rows, accumulate, swiglu, ...layers);
  });
}

function enqueueOf(args: object): typeof single {
  expectObject('linear', 'the arguments', args);
  const { swiglu = false } = args as { readonly swiglu?: unknown };
  expectBoolean('linear', 'swiglu', swiglu);
  const count = 'layers' in args ? listOf('linear', 'layers', args.layers as readonly unknown[], mostLayers).length : undefined;
  expectThat('linear', 'layers', count ?? 1, !swiglu || count === 2, 'two layers, where swiglu is true');
  if (swiglu) return gated;
  if (count === undefined) return single;
  several[count] ??= linearOf(Array.from({ length: count }, (_, layer) => layerRules(layer)));
  return several[count];
}
