import { copyBlocks, type Stream } from '@kv/sparse-core';
import { type KvOperand, type Blocks24, operands } from '../blocks-24.js';
import { copyIndexMap } from '../operations/copy-index-map.js';
import type { HeadBlocks, HeldBlocks } from './head-blocks.js';
import type { BlockPools24 } from './block-pools-24.js';

/** Dense blocks that a head of a slot is about to write to. */
export interface WrittenBlocks extends HeldBlocks {
  readonly slot: number;
  readonly head: HeadBlocks;
}

/** Those of them that other heads hold too. */
export interface SharedBlocks {
  readonly pairs: readonly WrittenBlocks[];
  readonly singles: readonly WrittenBlocks[];
}

export function sharedOf(pools: BlockPools24, written: readonly WrittenBlocks[]): SharedBlocks {
  return {
    pairs: pools.pairIds.toReplace(written.filter(({ kind }) => kind === 'pair')),
    singles: pools.singleIds.toReplace(written.filter(({ kind }) => kind === 'single')),
  };
}

/**
 * Puts copies in the place of shared blocks, in the index maps too. Where of a sequence a block is, the device knows.
 * @param others as many new ones as are to be replaced, singles by their places; free again if this throws
 */
export function replaceShared(
  stream: Stream,
  pools: BlockPools24,
  tables: Readonly<Record<KvOperand, Blocks24['table']>>,
  shared: SharedBlocks,
  { pairs, singles }: { readonly pairs: Int32Array; readonly singles: Int32Array },
): void {
  const moves = [
    // Both blocks of a pair lie at its number of their part of the pool.
    ...shared.pairs.map((blocks, index) => ({ ...blocks, by: (pairs[index] ?? NaN) - blocks.id })),
    ...shared.singles.map((blocks, index) => ({ ...blocks, by: (singles[index] ?? NaN) - (blocks.places[0] ?? NaN) })),
  ].map(({ slot, head, places, by }) => ({ slot, head, from: places, to: places.map((place) => place + by) }));
  if (moves.length === 0) return;
  const [from, to] = [moves.flatMap((move) => move.from), moves.flatMap((move) => move.to)];
  try {
    copyBlocks(stream, { pool: pools.dense, from, to });
    for (const slot of new Set(moves.map((move) => move.slot))) {
      const ofSlot = moves.filter((move) => move.slot === slot);
      const dense = { from: ofSlot.flatMap((move) => move.from), to: ofSlot.flatMap((move) => move.to) };
      copyIndexMap(stream, { ...tables, fromSlot: slot, toSlot: slot, dense, sparse: { from: [], to: [] } });
    }
  } catch (error) {
    pools.freePairs(pairs);
    pools.freeDense(singles);
    throw error;
  }
  for (const head of new Set(moves.map((move) => move.head))) {
    const ofHead = moves.filter((move) => move.head === head);
    const pairsAndPlaces = ofHead.flatMap((move) => move.from.map((place, index) => [place, move.to[index] ?? NaN] as const));
    head.replace(new Map(pairsAndPlaces));
  }
  pools.freeDense(Int32Array.from(from));
  // Of a pair of which the head held one block the other is nobody's.
  const taken = new Set(to);
  for (const operand of operands) pools.freeDense(pools.placesOf(operand, pairs).filter((place) => !taken.has(place)));
}
