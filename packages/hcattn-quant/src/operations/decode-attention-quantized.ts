import type { AttentionArguments, Stream, TensorHandle } from '@kv/sparse-core';
import {
  attentionRules,
  attentionSettings,
  batchRules,
  expectBoolean,
  expectHeads,
  expectShape,
  expectThat,
  loadAddon,
  operation,
} from '@kv/sparse-core/native';
import { type AttentionBits, expectAttentionBits, quantizedBlockBytes, type QuantizedBlocks } from '../quantized-blocks.js';

export interface DecodeAttentionQuantizedArguments extends Omit<AttentionArguments, 'blocks' | 'causal'> {
  /** u8 `[quantizedBlock, byte]`, `quantizedBlockBytes(headDim, keyBits)` bytes a block. */
  readonly quantizedKeys: QuantizedBlocks;
  /** As many blocks, of `quantizedBlockBytes(headDim, valueBits)` bytes. A block of values has the number of its keys. */
  readonly quantizedValues: QuantizedBlocks;
  /** Bits of a code of keys: 8 or 4. */
  readonly keyBits: AttentionBits;
  /** Bits of a code of values: 8 or 4. */
  readonly valueBits: AttentionBits;
  /** i32: the numbers of each kv head's quantized blocks. */
  readonly blockTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
  /** i32: how many tokens each kv head of each slot holds: a multiple of 64. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /**
   * Whether `output` and `logSumExp` hold attention of the rows over other keys, which becomes that over all, as by
   * `mergeAttention`. Default false.
   */
  readonly merge?: boolean | undefined;
}

/** In the order of `native/bindings/decode-attention-quantized.binding.cc`. */
const rules = [
  ...attentionRules,
  { name: 'quantizedKeys', dtype: ['u8'], shape: ['quantizedBlock', 'keyByte'], layout: 'contiguous' },
  { name: 'quantizedValues', dtype: ['u8'], shape: ['quantizedBlock', 'valueByte'], layout: 'contiguous' },
  { name: 'blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' },
  { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  ...batchRules,
] as const;

const enqueue = operation('decodeAttentionQuantized', rules, ['output', 'logSumExp']);

/**
 * What `decodeAttention` computes without a causal limit, over quantized blocks: with `q'` a rotated query, and `k` and
 * `v` what the codes stand for, `o' = sum_j softmax_j(scale q' . k_j) v_j`, and `output` is `o'` rotated back. A slot
 * without blocks gives zeros and a `logSumExp` of minus infinity, or with `merge` what was there before. On the
 * CPU the result does not depend on batch neighbours, thread count or the order of blocks.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError; InvalidValueError, also for `merge` without `logSumExp`
 * @throws CapabilityError for other than 8 or 4 bits, or heads of more than 512 dims; tables that lead outside, and counts
 * that are no multiples of 64, reject the stream's next wait with an InvalidValueError
 */
export function decodeAttentionQuantized(stream: Stream, args: DecodeAttentionQuantizedArguments): void {
  enqueue(stream, args, (natives, [query, , , keys, values, , keyCounts]) => {
    const name = 'decodeAttentionQuantized';
    const { keyBits, valueBits, merge = false } = args;
    const headDim = query.shape[2];
    expectAttentionBits(name, { keyBits, valueBits });
    expectShape(name, 'quantizedKeys', keys, [undefined, quantizedBlockBytes(headDim, keyBits)]);
    expectShape(name, 'quantizedValues', values, [keys.shape[0], quantizedBlockBytes(headDim, valueBits)]);
    expectHeads(name, query, keyCounts.shape[1]);
    const [scale] = attentionSettings(name, { scale: args.scale });
    expectBoolean(name, 'merge', merge);
    expectThat(name, 'logSumExp', args.logSumExp, !merge || args.logSumExp !== undefined, 'a tensor, since merge is true');
    loadAddon().decodeAttentionQuantized(stream.native, ...natives, scale, keyBits, valueBits, merge);
  });
}
