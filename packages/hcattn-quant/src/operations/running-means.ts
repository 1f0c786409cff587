import { type FloatDType, InvalidValueError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { expectIndices, expectThat, floats, listFor, listOf, loadAddon, operation } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

export interface RunningMeansArguments {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head. */
  readonly values: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** f32: of each block, the sum of the values of its kv head up to the block's end. May be in host memory. */
  readonly sums: TensorHandle<'f32', readonly ['valueBlock', 'dim']>;
  /** Of the dtype of `values`: the same as means, a row for each block of `sums`, or more. May be in host memory. */
  readonly means: TensorHandle<FloatDType, readonly ['valueBlock', 'dim']>;
  /** The blocks of `values` to read, of which all 64 tokens count. */
  readonly from: ArrayLike<number>;
  /** The blocks of `sums` and `means` to write, one for each, none twice. */
  readonly to: ArrayLike<number>;
  /** The block of `sums` that each goes on from: the one in front of it in `to`, or one that `to` does not have; -1 for none. */
  readonly before: ArrayLike<number>;
  /** Of how many blocks each sum is. */
  readonly counts: ArrayLike<number>;
}

/** In the order of `native/bindings/running-means.binding.cc`. */
const rules = [
  { name: 'values', dtype: floats, shape: ['block', blockTokens, 'dim'], layout: 'rows' },
  { name: 'sums', dtype: ['f32'], shape: ['valueBlock', 'dim'], layout: 'contiguous' },
  { name: 'means', dtypeOf: 'values', shape: ['meanRow', 'dim'], layout: 'contiguous' },
] as const;

const enqueue = operation('runningMeans', rules, ['sums', 'means']);

/**
 * Means of the values of kv heads up to each of their blocks, for what a row of answers leaves out (`meanValue` of
 * `selectByMass`): `sums[to[i]] = sums[before[i]] + sum over tokens of values[from[i]]` and
 * `means[to[i]] = sums[to[i]] / (64 counts[i])`, in the order of the list. Sums are f32, token by token: every device makes
 * the same bytes. A number that is not finite stays in its kv head and dim.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for blocks that their tensors do not have, a block of `to` that appears twice, one that goes on
 * from a block further away in the list, or a count below 1
 */
export function runningMeans(stream: Stream, args: RunningMeansArguments): void {
  enqueue(stream, args, (natives, [values, sums, means]) => {
    const name = 'runningMeans';
    const [blocks] = sums.shape;
    expectThat(name, 'means', means.shape, means.shape[0] >= blocks, `a row for each of the ${blocks} blocks of sums`);
    const to = listOf(name, 'to', args.to, blocks);
    const listed = (of: 'from' | 'before' | 'counts') => listFor(name, of, args[of], 'to', to.length);
    const [from, before, counts] = [listed('from'), listed('before'), listed('counts')];
    expectIndices(name, 'to', to, blocks);
    expectIndices(name, 'from', from, values.shape[0]);
    expectIndices(name, 'before', before.filter((block) => block !== -1), blocks);
    const areCounts = counts.every((count) => Number.isInteger(count) && count >= 1 && count <= blocks);
    expectThat(name, 'counts', counts, areCounts, `whole numbers from 1 to ${blocks}`);
    const written = new Set(to);
    expectThat(name, 'to', args.to, written.size === to.length, 'every block once');
    const astray = before.findIndex((block, index) => written.has(block) && block !== to[index - 1]);
    if (astray !== -1) {
      throw new InvalidValueError(
        `${name}: entry ${astray} goes on from block ${before[astray]}, which to has elsewhere; put the entries of a kv head one after another.`,
        { subject: 'before', given: before[astray], wanted: to[astray - 1] },
      );
    }
    using list = stream.device.tensor('i32', ['end', 'sum'], [4, to.length], Int32Array.from([from, to, before, counts].flat()));
    loadAddon().runningMeans(stream.native, ...natives, list.native);
  });
}
