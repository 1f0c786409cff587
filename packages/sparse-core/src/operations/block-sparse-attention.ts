import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import type { Stream, TensorHandle } from '../handles.js';
import {
  type AttentionArguments,
  attentionRules,
  attentionSettings,
  expectHeads,
  pagedRowRules,
} from './attention-arguments.js';

export interface BlockSparseAttentionArguments extends AttentionArguments {
  /**
   * i32 `[queryHead, queryTile, listedBlock]`, contiguous: which key blocks the rows of a query tile attend to. A query
   * tile is 128 rows of one entry that follow each other; each entry begins a new tile, and the entries' tiles follow
   * one another. There are at most `floor(tokens / 128) + batch` of them; what stands behind the last is not read. Key
   * block j is the keys `64 * j .. 64 * j + 63` of the sequence. A list ascends strictly, and the last row of its tile
   * sees a key of each block.
   */
  readonly keyBlocks: TensorHandle<'i32', readonly ['queryHead', 'queryTile', 'listedBlock']>;
  /** i32 `[queryHead, queryTile]`, contiguous: how many blocks are listed; 0 is allowed. */
  readonly keyBlockCounts: TensorHandle<'i32', readonly ['queryHead', 'queryTile']>;
}

const enqueue = operation(
  'blockSparseAttention',
  [
    ...attentionRules,
    ...pagedRowRules,
    { name: 'keyBlocks', dtype: ['i32'], shape: ['queryHead', 'queryTile', 'listedBlock'], layout: 'contiguous' },
    { name: 'keyBlockCounts', dtype: ['i32'], shape: ['queryHead', 'queryTile'], layout: 'contiguous' },
  ],
  ['output', 'logSumExp'],
);

/**
 * What `prefillAttention` computes, of listed key blocks only: `output[i, h] = sum_j softmax_j(scale * query[i, h] .
 * key[j]) value[j]` over the keys that query i sees and that lie in a block listed for head h and the tile of row i. A
 * row that sees no listed key gives zeros and a `logSumExp` of minus infinity. Time goes with the number of listed blocks.
 *
 * The lists are read on the device, so that a kernel may make them; nothing waits for the host. With lists of all blocks
 * the result is that of `prefillAttention`, bit for bit. A list that does not ascend, that repeats a block, or that
 * reaches past what its rows see rejects the stream's next wait with an InvalidValueError, as do counts, slots and
 * blocks outside their tensors.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function blockSparseAttention(stream: Stream, args: BlockSparseAttentionArguments): void {
  enqueue(stream, args, (natives, [query, , , , , , keyCounts]) => {
    expectHeads('blockSparseAttention', query, keyCounts.shape[1]);
    const settings = attentionSettings('blockSparseAttention', args);
    const [rows, output, logSumExp, keys, values, table, counts, slots, starts, ...lists] = natives;
    const attention = [rows, output, logSumExp, keys, values, table, counts, slots, starts, ...settings] as const;
    loadAddon().blockSparseAttention(stream.native, ...attention, ...lists);
  });
}
