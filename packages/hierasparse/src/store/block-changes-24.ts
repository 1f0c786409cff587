import { copyBlocks, type Stream, writeEntries } from '@kv/sparse-core';
import { joinedIds, type SlotTable } from '@kv/sparse-core/native';
import type { Shares } from '../block-sparsity.js';
import { type BlockLoss, type Blocks24, blockTokens, type KvOperand, operands } from '../blocks-24.js';
import type { ElementMask } from '../element-mask.js';
import { compress24 } from '../operations/compress-24.js';
import { type BlockPools24, sumOfNeeds } from './block-pools-24.js';
import { enqueueDense } from './enqueue-dense.js';
import type { HeadBlocks } from './head-blocks.js';
import { replaceShared, sharedOf, type WrittenBlocks } from './replace-shared.js';

/** Blocks that a kv head of a slot needs more. */
export interface Growth {
  readonly slot: number;
  readonly kvHead: number;
  readonly blocks: number;
}

/** A block of a kv head of a slot. */
interface Place {
  readonly slot: number;
  readonly kvHead: number;
  readonly firstBlock: number;
}

/** Blocks that follow each other, and so have entries of an index map that do. */
interface BlockRange extends Place {
  readonly blocks: number;
}

/** New candidates of a kv head of a slot, from that block on. */
interface Extension extends Place {
  readonly blocks: HeadBlocks;
  readonly shares: Shares;
  readonly pairs: Int32Array;
}

export interface ChangeParts {
  readonly pools: BlockPools24;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
  readonly masks: Partial<Record<KvOperand, ElementMask>>;
  /** Of the shape of the index maps. */
  readonly losses: Partial<Record<KvOperand, BlockLoss>>;
}

/** Changes which blocks hold the tokens of a layer's slots: new ones, sparse ones in the place of dense ones, and dense ones again. */
export class BlockChanges24 {
  readonly #parts: ChangeParts;
  readonly #slots: SlotTable<readonly HeadBlocks[], KvOperand>;

  constructor(parts: ChangeParts, slots: SlotTable<readonly HeadBlocks[], KvOperand>) {
    this.#parts = parts;
    this.#slots = slots;
  }

  /** Brings the full blocks of slots, between sinks and local window, to a sparsity; default: to what theirs is now. */
  prune(stream: Stream, slots: readonly number[], sparsity?: Shares): void {
    const { masks, losses } = this.#parts;
    const unsettled = slots.flatMap((slot) => {
      const lengths = this.#slots.lengths(slot);
      return this.#slots.blocks(slot).flatMap((blocks, kvHead) => {
        const endBlock = this.rangeEnd(lengths[kvHead] ?? 0);
        const shares = sparsity ?? blocks.shares;
        return blocks.settled(endBlock, shares) ? [] : [{ slot, kvHead, blocks, shares, endBlock }];
      });
    });
    const written = unsettled.flatMap(({ slot, blocks: head, shares, endBlock }) =>
      head.movedBy(endBlock, [shares]).map((moved) => ({ slot, head, ...moved })),
    );
    this.grow(stream, [], written);
    const extensions = unsettled.map(({ endBlock, ...head }): Extension => {
      const firstBlock = head.blocks.endBlock;
      return { ...head, firstBlock, pairs: head.blocks.extendRange(endBlock) };
    });
    for (const operand of operands) {
      this.#place(stream, operand, extensions);
      const prunings = extensions.flatMap(({ slot, kvHead, blocks, shares }) => {
        const pruning = blocks.prune(operand, shares[operand]);
        return pruning === undefined ? [] : [{ slot, kvHead, ...pruning }];
      });
      if (prunings.length === 0) continue;
      const [elementMask, blockLoss] = [masks[operand], losses[operand]];
      compress24(stream, { operand, blocks: this.blocks24(operand), prunings, elementMask, blockLoss });
    }
  }

  /** Lets the new candidates leave their pairs, those that may stay dense for singles. */
  #place(stream: Stream, operand: KvOperand, extensions: readonly Extension[]): void {
    const { pools } = this.#parts;
    const from: Int32Array[] = [];
    const to: Int32Array[] = [];
    const ranges: BlockRange[] = [];
    for (const { slot, kvHead, blocks, shares, firstBlock, pairs } of extensions) {
      if (pairs.length === 0) continue;
      const places = pools.placesOf(operand, pairs);
      if (!blocks.needsSingle(shares[operand])) {
        blocks.place(operand, places);
        continue;
      }
      const singles = pools.allocateSingles(pairs.length);
      blocks.place(operand, singles);
      ranges.push({ slot, kvHead, firstBlock, blocks: pairs.length });
      from.push(places);
      to.push(singles);
    }
    if (from.length === 0) return;
    const [left, taken] = [joinedIds(...from), joinedIds(...to)];
    this.#map(stream, operand, this.#entriesOf(ranges), taken);
    copyBlocks(stream, { pool: pools.dense, from: left, to: taken });
    pools.freeDense(left);
  }

  /**
   * Puts new pairs of blocks behind those of heads, and others in the place of shared ones that are to be written to.
   * @throws OutOfMemoryError when there is no room for them, dense now or sparse later; nothing changes then
   */
  grow(stream: Stream, growth: readonly Growth[], written: readonly WrittenBlocks[]): void {
    const { pools } = this.#parts;
    const shared = sharedOf(pools, written);
    if (growth.length + shared.pairs.length + shared.singles.length === 0) return;
    const headOf = ({ slot, kvHead }: Growth) => this.#slots.blocks(slot)[kvHead];
    const { singles, ...sparse } = sumOfNeeds(growth.map((one) => headOf(one)?.needs(one.blocks)));
    pools.expectUnpromised({ ...sparse, singles: singles + shared.singles.length });
    const [replaced, added] = [shared.pairs.length, growth.reduce((sum, { blocks }) => sum + blocks, 0)];
    const allocated = pools.allocatePairs(replaced + added);
    const others = { pairs: allocated.subarray(0, replaced), singles: pools.allocateSingles(shared.singles.length) };
    let fresh = allocated.subarray(replaced);
    try {
      replaceShared(stream, pools, this.#slots.tables, shared, others);
    } catch (error) {
      pools.freePairs(fresh);
      throw error;
    }
    const ranges = growth.map((one): BlockRange => {
      const pairs = fresh.subarray(0, one.blocks);
      fresh = fresh.subarray(one.blocks);
      const head = headOf(one);
      const firstBlock = head?.count ?? 0;
      head?.add(pairs);
      return { ...one, firstBlock };
    });
    if (added === 0) return;
    const at = this.#entriesOf(ranges);
    for (const operand of operands) {
      this.#map(stream, operand, at, pools.placesOf(operand, allocated.subarray(replaced)));
    }
  }

  makeDense(stream: Stream, slot: number, maps: Record<KvOperand, Int32Array>): void {
    const { pools, sinkBlocks: firstBlock } = this.#parts;
    for (const [kvHead, head] of this.#slots.blocks(slot).entries()) {
      if (!head.pruned) continue;
      const pairs = pools.allocatePairs(head.endBlock - firstBlock);
      const at = this.#entriesOf([{ slot, kvHead, firstBlock, blocks: pairs.length }]);
      for (const operand of operands) {
        const row = kvHead * this.#slots.tables[operand].shape[2];
        const entries = maps[operand].subarray(row + firstBlock, row + head.endBlock);
        const places = pools.placesOf(operand, pairs);
        enqueueDense(stream, pools, operand, entries, places);
        this.#map(stream, operand, at, places);
      }
      head.makeDense(pairs);
    }
  }

  blocks24(operand: KvOperand): Blocks24 {
    const { dense, sparse } = this.#parts.pools;
    return { dense, sparse: sparse[operand], table: this.#slots.tables[operand] };
  }

  /** Which entries of an index map blocks have, range by range. A loop: a chunk of a prompt has thousands in every layer. */
  #entriesOf(ranges: readonly BlockRange[]): Int32Array {
    const [, kvHeads, width] = this.#slots.tables.keys.shape;
    const at = new Int32Array(ranges.reduce((sum, { blocks }) => sum + blocks, 0));
    let end = 0;
    for (const { slot, kvHead, firstBlock, blocks } of ranges) {
      const first = (slot * kvHeads + kvHead) * width + firstBlock;
      for (let block = 0; block < blocks; block++) at[end++] = first + block;
    }
    return at;
  }

  #map(stream: Stream, operand: KvOperand, at: Int32Array, entries: Int32Array): void {
    writeEntries(stream, { table: this.#slots.tables[operand], at, entries });
  }

  /** Where the range of prunings ends with so many tokens. */
  rangeEnd(tokens: number): number {
    return Math.floor((tokens - this.#parts.localWindow) / blockTokens);
  }
}
