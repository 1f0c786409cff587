import { type FloatDType, ShapeError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { expectThat, floats, loadAddon, operation } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

/** All of them are in host memory: on CUDA, tensors of `device.hostTensor()` or of a host pool. With `hostValueRows`, lists need not be. */
export interface WeightedValuesArguments {
  /** i32: the first `counts` of each list are rows of `values`, counted through its blocks. */
  readonly valueRows: TensorHandle<'i32', readonly ['token', 'kvHead', 'chosen']>;
  /** f32: of each listed row, for each query head of the kv head. */
  readonly weights: TensorHandle<'f32', readonly ['token', 'kvHead', 'chosen', 'groupHead']>;
  /** i32: 0 to `chosen`. */
  readonly counts: TensorHandle<'i32', readonly ['token', 'kvHead']>;
  /** The codes of i8 values count as whole numbers: `weights` have their scales. */
  readonly values: TensorHandle<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>;
  /** f32, contiguous: zeros for an empty list. */
  readonly output: TensorHandle<'f32', readonly ['token', 'queryHead', 'dim']>;
  /**
   * Room for `valueRows`, with `hostWeights` and `hostCounts`, which take what the host needs of lists in the memory of a
   * GPU. What is in them afterwards is undefined.
   */
  readonly hostValueRows?: WeightedValuesArguments['valueRows'] | undefined;
  /** Room for `weights`, given together with `hostValueRows`. */
  readonly hostWeights?: WeightedValuesArguments['weights'] | undefined;
  /** Room for `counts`, given together with `hostValueRows`. */
  readonly hostCounts?: WeightedValuesArguments['counts'] | undefined;
}

/** In the order of `native/bindings/weighted-values.binding.cc`. */
const rules = [
  { name: 'valueRows', dtype: ['i32'], shape: ['token', 'kvHead', 'chosen'], layout: 'contiguous' },
  { name: 'weights', dtype: ['f32'], shape: ['token', 'kvHead', 'chosen', 'groupHead'], layout: 'contiguous' },
  { name: 'counts', dtype: ['i32'], shape: ['token', 'kvHead'], layout: 'contiguous' },
  { name: 'values', dtype: [...floats, 'i8'], shape: ['valueBlock', blockTokens, 'dim'], layout: 'contiguous' },
  { name: 'output', dtype: ['f32'], shape: ['token', 'queryHead', 'dim'], layout: 'contiguous' },
  { name: 'hostValueRows', dtype: ['i32'], shape: ['token', 'kvHead', 'chosen'], layout: 'contiguous', optional: true },
  { name: 'hostWeights', dtype: ['f32'], shape: ['token', 'kvHead', 'chosen', 'groupHead'], layout: 'contiguous', optional: true },
  { name: 'hostCounts', dtype: ['i32'], shape: ['token', 'kvHead'], layout: 'contiguous', optional: true },
] as const;

const enqueue = operation('weightedValues', rules, ['output', 'hostValueRows', 'hostWeights', 'hostCounts']);

/**
 * Sums on the host the values that lists name (HCAttention Eq. 5): `output = sum_i weights[i] values[valueRows[i]]`, zeros
 * for an empty list. It takes its turn in the stream, recorded or not. Sums are f32, of 512 rows at a time, and the
 * result does not depend on the number of threads.
 * @throws ShapeError, DTypeError, DisposedError
 * @throws DeviceError for a tensor in the memory of a GPU
 * @throws InvalidValueError when the output shares memory with an input; lists that lead outside reject the stream's next
 * wait with one
 */
export function weightedValues(stream: Stream, args: WeightedValuesArguments): void {
  enqueue(stream, args, (natives, [, weights, , , output]) => {
    const [, kvHeads, , group] = weights.shape;
    const given = [args.hostValueRows, args.hostWeights, args.hostCounts].filter((tensor) => tensor !== undefined).length;
    expectThat('weightedValues', 'the number of tensors with room for lists', given, given % 3 === 0, '0 or 3');
    if (output.shape[1] !== kvHeads * group) {
      throw new ShapeError(
        `weightedValues: output has ${output.shape[1]} query heads, and weights have ${group} for each of ${kvHeads} kv heads; ` +
          'give the output as many.',
        { subject: 'output', given: output.shape[1], wanted: kvHeads * group },
      );
    }
    loadAddon().weightedValues(stream.native, ...natives);
  });
}
