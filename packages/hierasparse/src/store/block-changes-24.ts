import { copyBlocks, type Stream } from '@kv/sparse-core';
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
    for (const { slot, kvHead, blocks, shares, firstBlock, pairs } of extensions) {
      if (pairs.length === 0) continue;
      const places = pools.placesOf(operand, pairs);
      if (!blocks.needsSingle(shares[operand])) {
        blocks.place(operand, places);
        continue;
      }
      const singles = pools.allocateSingles(pairs.length);
      blocks.place(operand, singles);
      this.#map(stream, operand, { slot, kvHead, firstBlock }, singles);
      from.push(places);
      to.push(singles);
    }
    if (from.length === 0) return;
    copyBlocks(stream, { pool: pools.dense, from: joinedIds(...from), to: joinedIds(...to) });
    pools.freeDense(joinedIds(...from));
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
    for (const one of growth) {
      const pairs = fresh.subarray(0, one.blocks);
      fresh = fresh.subarray(one.blocks);
      const head = headOf(one);
      const place = { ...one, firstBlock: head?.count ?? 0 };
      for (const operand of operands) {
        this.#map(stream, operand, place, pools.placesOf(operand, pairs));
      }
      head?.add(pairs);
    }
  }

  makeDense(stream: Stream, slot: number, maps: Record<KvOperand, Int32Array>): void {
    const { pools, sinkBlocks: firstBlock } = this.#parts;
    for (const [kvHead, head] of this.#slots.blocks(slot).entries()) {
      if (!head.pruned) continue;
      const pairs = pools.allocatePairs(head.endBlock - firstBlock);
      for (const operand of operands) {
        const row = kvHead * this.#slots.tables[operand].shape[2];
        const entries = maps[operand].subarray(row + firstBlock, row + head.endBlock);
        const places = pools.placesOf(operand, pairs);
        enqueueDense(stream, pools, operand, entries, places);
        this.#map(stream, operand, { slot, kvHead, firstBlock }, places);
      }
      head.makeDense(pairs);
    }
  }

  blocks24(operand: KvOperand): Blocks24 {
    const { dense, sparse } = this.#parts.pools;
    return { dense, sparse: sparse[operand], table: this.#slots.tables[operand] };
  }

  /** Writes entries of an index map, from a block of a sequence on. */
  #map(stream: Stream, operand: KvOperand, { slot, kvHead, firstBlock }: Place, entries: Int32Array): void {
    if (entries.length === 0) return;
    const row = this.#slots.tables[operand].slice('slot', slot, slot + 1).slice('kvHead', kvHead, kvHead + 1);
    stream.write(row.slice('block', firstBlock, firstBlock + entries.length), entries);
  }

  /** Where the range of prunings ends with so many tokens. */
  rangeEnd(tokens: number): number {
    return Math.floor((tokens - this.#parts.localWindow) / blockTokens);
  }
}
