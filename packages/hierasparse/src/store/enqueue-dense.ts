import { copyBlocks, type Stream } from '@kv/sparse-core';
import { blockNumber, isDense } from '@kv/sparse-core/native';
import type { KvOperand } from '../blocks-24.js';
import { decompress24 } from '../operations/decompress-24.js';
import type { BlockPools24 } from './block-pools-24.js';

/**
 * Enqueues the writing of blocks, dense or sparse, into dense blocks of the pools.
 * @param entries what the index map says of each
 * @param places where each goes in the dense pool
 */
export function enqueueDense(
  stream: Stream,
  pools: BlockPools24,
  operand: KvOperand,
  entries: Int32Array,
  places: Int32Array,
): void {
  const dense = { from: [] as number[], to: [] as number[] };
  const sparse = { from: [] as number[], to: [] as number[] };
  entries.forEach((entry, index) => {
    const copies = isDense(entry) ? dense : sparse;
    copies.from.push(blockNumber(entry));
    copies.to.push(places[index] ?? NaN);
  });
  copyBlocks(stream, { pool: pools.dense, ...dense });
  decompress24(stream, {
    operand,
    sparse: pools.sparse[operand],
    ids: sparse.from,
    dense: pools.dense,
    places: sparse.to,
  });
}
