import type { NativeTensor } from '../native-handles.js';
import type { DType } from '../dtype.js';
import type { Stream, Tensor } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { nativeOf } from '../tensor.js';
import { expectBoolean } from '../validate.js';
import { type AttentionArguments, attentionRules, attentionSettings, expectHeads, pagedRowRules } from './attention-arguments.js';

export interface DecodeAttentionArguments extends AttentionArguments {
  /** Where a CUDA device cuts the keys of an entry then depends on that entry alone, for a launch each. Default: false. */
  readonly apart?: boolean | undefined;
}

const enqueue = operation('decodeAttention', [...attentionRules, ...pagedRowRules], ['output', 'logSumExp']);

/**
 * What `prefillAttention` computes, for one new row per sequence (or a few): the keys of each sequence are
 * split among the threads and the parts merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023), so
 * that the cache is read once at the speed of the memory. The result does not depend on batch neighbours,
 * thread count or the order of blocks; on CUDA, to the bit, with `apart` alone.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function decodeAttention(stream: Stream, args: DecodeAttentionArguments): void {
  enqueue(stream, args, (natives, tensors) => {
    const [query, output, logSumExp, keys, values, blockTable, keyCounts, ...batch] = natives;
    expectHeads('decodeAttention', tensors[0], tensors[6].shape[1]);
    const settings = attentionSettings('decodeAttention', args);
    const { apart = false } = args;
    expectBoolean('decodeAttention', 'apart', apart);
    for (const [slots, queryStart] of apart ? entriesApart(stream, tensors[7], tensors[8]) : [batch]) {
      loadAddon().decodeAttention(stream.native, query, output, logSumExp, keys, values, blockTable, keyCounts, slots, queryStart, ...settings);
    }
  });
}

/** Each entry of a batch as a batch of its own, of the same rows. */
function entriesApart(stream: Stream, slots: Tensor<DType, readonly [string]>, queryStart: Tensor<DType, readonly [string]>) {
  const nativeSlice = (tensor: Tensor<DType, readonly [string]>, first: number, end: number): NativeTensor =>
    nativeOf('decodeAttention', 'batch', tensor.slice(tensor.axes[0], first, end), stream).native;
  return Array.from(
    { length: slots.shape[0] },
    (_, entry) => [nativeSlice(slots, entry, entry + 1), nativeSlice(queryStart, entry, entry + 2)] as const,
  );
}
