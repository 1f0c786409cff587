import type { Stream } from '@kv/sparse-core';
import type { BlockCodec, DenseBlocks, StagedMove } from './block-codec.js';
import { notStaged } from './slot-codes.js';

/** A dense block that becomes a quantized one. */
export interface LeavingBlock {
  readonly kvHead: number;
  readonly from: number;
  /** The quantized blocks of its kv head, and how many others go in front of it. */
  readonly codes: Int32Array;
  readonly nth: number;
  /** Whether it passes through host memory, and whether later rows read it there. */
  readonly passes: boolean;
  readonly stays: boolean;
}

/**
 * Takes blocks of the cache for dense ones, and enqueues writing them.
 * @throws OutOfMemoryError; nothing is taken then
 */
export function encodeBlocks(stream: Stream, codec: BlockCodec, dense: DenseBlocks, leaving: readonly LeavingBlock[]): StagedMove[] {
  const fresh = codec.ids.allocate(leaving.length);
  let staged: Int32Array = new Int32Array();
  try {
    staged = codec.staged?.ids.allocate(leaving.filter(({ stays }) => stays).length) ?? staged;
    let next = 0;
    const moves = leaving.map(({ kvHead, from, codes, nth, stays }, index) => ({
      ...{ kvHead, from, to: fresh[index] ?? NaN, place: codes.length + nth },
      before: nth === 0 ? codes.at(-1) : fresh[index - 1],
      staged: stays ? (staged[next++] ?? NaN) : notStaged,
    }));
    const [passing, others] = [true, false].map((passes) => moves.filter((_, index) => leaving[index]?.passes === passes));
    if (others && others.length > 0) codec.encode(stream, dense, others);
    if (passing && passing.length > 0) codec.encodeStaged?.(stream, dense, passing);
    return moves;
  } catch (error) {
    codec.ids.free(fresh);
    codec.staged?.ids.free(staged);
    throw error;
  }
}
