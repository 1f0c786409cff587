import {
  appendKv,
  type AppendCall,
  CapabilityError,
  copyBlocks,
  decodeAttention,
  type DecodeCall,
  type FinishDecode,
  gatherKv,
  InvalidValueError,
  type KvBytes,
  type KvCapacity,
  type KvLayer,
  type KvStore,
  type PagedBlocks,
  prefillAttention,
  type PrefillCall,
  type RowBatch,
  type Stream,
  type Tensor,
  type TokenSelection,
} from '@kv/sparse-core';
import { ElementMask } from '../element-mask.js';
import { blockTokens, type KvOperand, type MixedBlocks } from '../mixed-blocks.js';
import { compress24 } from '../operations/compress-24.js';
import { mixedDecodeAttention } from '../operations/mixed-decode-attention.js';
import { mixedPrefillAttention } from '../operations/mixed-prefill-attention.js';
import { HeadBlocks } from './head-blocks.js';
import type { MixedBlockPools } from './mixed-block-pools.js';

type Shares = Readonly<Record<KvOperand, number>>;
type IndexMap = Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;

const operands = ['keys', 'values'] as const;

/** Blocks that a kv head of a slot needs more. */
interface Growth {
  readonly slot: number;
  readonly head: number;
  readonly blocks: number;
}

export interface StoreParts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  readonly pools: MixedBlockPools;
  /** What of the layer is sparse after the prompt. */
  readonly shares: Shares;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
  readonly masks: Partial<Record<KvOperand, ElementMask>>;
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** Keys and values of one layer in dense and 2:4 sparse blocks. */
export class HieraSparseStore implements KvStore {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #parts: StoreParts;
  readonly #tableWidth: number;
  readonly #maps: Record<KvOperand, IndexMap>;
  readonly #keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  readonly #heads: HeadBlocks[][];
  readonly #counts: number[][];

  constructor(parts: StoreParts) {
    const { layer, capacity, pools, sinkBlocks, shares } = parts;
    const { device, slots, tokensPerSlot } = capacity;
    this.name = parts.name;
    this.layer = layer;
    this.#parts = parts;
    this.#tableWidth = Math.ceil(tokensPerSlot / blockTokens);
    const shape = [slots, layer.kvHeads, this.#tableWidth] as const;
    const none = new Int32Array(slots * layer.kvHeads * this.#tableWidth);
    const map = () => device.tensor('i32', ['slot', 'kvHead', 'block'], shape, none);
    this.#maps = { keys: map(), values: map() };
    const counts = new Int32Array(slots * layer.kvHeads);
    this.#keyCounts = device.tensor('i32', ['slot', 'kvHead'], [slots, layer.kvHeads], counts);
    const perHead = <T>(value: () => T) => Array.from({ length: layer.kvHeads }, value);
    this.#heads = Array.from({ length: slots }, () =>
      perHead(() => new HeadBlocks(pools, sinkBlocks, shares)),
    );
    this.#counts = Array.from({ length: slots }, () => perHead(() => 0));
  }

  prepare(stream: Stream, batch: RowBatch): void {
    const missing: Growth[] = [];
    for (const { slot, rows } of batch.entries) {
      this.lengths(slot).forEach((count, head) => {
        const blocks = this.#blocksFor(slot, count + rows) - (this.#heads[slot]?.[head]?.count ?? 0);
        if (blocks > 0) missing.push({ slot, head, blocks });
      });
    }
    this.#grow(stream, missing);
  }

  append(stream: Stream, { batch, keys, values }: AppendCall): void {
    // What is appended to is dense, under one number for keys and values.
    const { slots, queryStart } = batch;
    appendKv(stream, { keys, values, blocks: this.#asDense(), slots, queryStart });
  }

  advance(batch: RowBatch): void {
    for (const { slot, rows } of batch.entries) {
      this.#counts[slot] = this.lengths(slot).map((count) => count + rows);
    }
  }

  /**
   * Makes full blocks of these slots sparse, up to `shares` of those between sinks and local window.
   * @throws CapabilityError when a share is more than the store's own
   */
  prune(stream: Stream, slots: readonly number[], shares: Shares): void {
    for (const operand of operands) this.#expectShare(operand, shares[operand]);
    if (shares.keys === 0 && shares.values === 0) return;
    const { localWindow, masks } = this.#parts;
    const heads = slots.flatMap((slot) =>
      this.lengths(slot).map((count, kvHead) => ({
        slot,
        kvHead,
        count,
        blocks: this.#heads[slot]?.[kvHead],
      })),
    );
    for (const { count, blocks } of heads)
      blocks?.extendRange(Math.floor((count - localWindow) / blockTokens));
    for (const operand of operands) {
      const prunings = heads.flatMap(({ slot, kvHead, blocks }) => {
        const pruning = blocks?.prune(operand, shares[operand]);
        return pruning === undefined ? [] : [{ slot, kvHead, ...pruning }];
      });
      const elementMask = masks[operand];
      compress24(stream, {
        operand,
        blocks: this.#mixed(operand),
        prunings,
        ...(elementMask && { elementMask }),
      });
    }
  }

  /** Attention of the rows of prompts over all that their slots hold. */
  attend(stream: Stream, { batch, query, output, scale }: PrefillCall): void {
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale, causal: true };
    if (this.#alwaysDense) prefillAttention(stream, { ...rows, blocks: this.#asDense() });
    else mixedPrefillAttention(stream, { ...rows, ...this.#mixedCache() });
  }

  startDecode(stream: Stream, { batch, query, output, scale }: DecodeCall): FinishDecode {
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale };
    if (this.#alwaysDense) decodeAttention(stream, { ...rows, blocks: this.#asDense() });
    else mixedDecodeAttention(stream, { ...rows, ...this.#mixedCache() });
    return () => undefined;
  }

  /** @throws CapabilityError when blocks of the slot are sparse: tokens can be dropped before, not after */
  keep(stream: Stream, slot: number, { indices, counts }: TokenSelection): void {
    this.#expectDense('keep', slot);
    gatherKv(stream, { blocks: this.#asDense(), slot, indices, counts });
    this.#counts[slot] = [...counts];
    counts.forEach((count, head) => this.#heads[slot]?.[head]?.truncate(Math.ceil(count / blockTokens)));
  }

  finishPrefill(stream: Stream, slot: number): void {
    this.prune(stream, [slot], this.#parts.shares);
  }

  /** @throws CapabilityError when blocks of the slot are sparse */
  copy(stream: Stream, fromSlot: number, toSlot: number): void {
    this.#expectDense('copy', fromSlot);
    if (this.lengths(toSlot).some((count) => count > 0)) {
      throw new InvalidValueError(
        `Slot ${toSlot} holds tokens; copy into an empty one, or release it first.`,
        {
          subject: 'toSlot',
          given: toSlot,
        },
      );
    }
    const { pools } = this.#parts;
    const needed = this.lengths(fromSlot).map((count) => Math.ceil(count / blockTokens));
    const from = needed.flatMap(
      (blocks, head) => this.#heads[fromSlot]?.[head]?.pairs.slice(0, blocks) ?? [],
    );
    const to = this.#grow(
      stream,
      needed.map((blocks, head) => ({ slot: toSlot, head, blocks })),
    );
    try {
      for (const operand of operands) copyBlocks(stream, { pool: pools.dense[operand], from, to });
    } catch (error) {
      this.release(stream, toSlot);
      throw error;
    }
    const countsOf = (slot: number) => this.#keyCounts.slice('slot', slot, slot + 1);
    stream.copy(countsOf(fromSlot), countsOf(toSlot));
    this.#counts[toSlot] = [...this.lengths(fromSlot)];
  }

  release(stream: Stream, slot: number): void {
    this.#counts[slot] = this.lengths(slot).map(() => 0);
    stream.write(this.#keyCounts.slice('slot', slot, slot + 1), new Int32Array(this.layer.kvHeads));
    for (const head of this.#heads[slot] ?? []) head.release();
  }

  lengths(slot: number): readonly number[] {
    const counts = this.#counts[slot];
    if (counts === undefined) {
      throw new InvalidValueError(`Slot ${slot} does not exist; the cache has ${this.#counts.length}.`, {
        subject: 'slot',
        given: slot,
        wanted: this.#counts.length,
      });
    }
    return counts;
  }

  denseBlocks(slots: readonly number[] = [...this.#heads.keys()]): PagedBlocks | undefined {
    return slots.some((slot) => this.#isPruned(slot)) ? undefined : this.#asDense();
  }

  bytes(): KvBytes {
    return { device: this.#heads.flat().reduce((sum, head) => sum + head.bytes(), 0), host: 0 };
  }

  dispose(): void {
    for (const head of this.#heads.flat()) head.release();
    for (const tensor of [this.#maps.keys, this.#maps.values, this.#keyCounts]) tensor.dispose();
    for (const mask of Object.values(this.#parts.masks)) mask.dispose();
    this.#parts.close();
  }

  get #alwaysDense(): boolean {
    const { keys, values } = this.#parts.shares;
    return keys === 0 && values === 0;
  }

  /** The cache under one table, right wherever nothing is sparse. */
  #asDense(): PagedBlocks {
    const { keys, values } = this.#parts.pools.padded;
    return { keys, values, blockTable: this.#maps.keys, keyCounts: this.#keyCounts };
  }

  #mixed(operand: KvOperand): MixedBlocks {
    const { dense, sparse } = this.#parts.pools;
    return { dense: dense[operand], sparse: sparse[operand], table: this.#maps[operand] };
  }

  #mixedCache() {
    const { shares } = this.#parts;
    return {
      keys: this.#mixed('keys'),
      values: this.#mixed('values'),
      keyCounts: this.#keyCounts,
      sparseKeys: shares.keys > 0,
      sparseValues: shares.values > 0,
    };
  }

  /**
   * Puts new pairs of blocks behind those of heads, and gives their numbers.
   * @throws OutOfMemoryError when there is no room for them, dense now or sparse later; nothing changes then
   */
  #grow(stream: Stream, growth: readonly Growth[]): readonly number[] {
    const sum = (part: (one: Growth) => number) => growth.reduce((total, one) => total + part(one), 0);
    const becomeSparse = (operand: KvOperand) =>
      sum(({ slot, head, blocks }) => this.#heads[slot]?.[head]?.becomeSparse(operand, blocks) ?? 0);
    const sparse = { keys: becomeSparse('keys'), values: becomeSparse('values') };
    const fresh = this.#parts.pools.allocatePairs(
      sum(({ blocks }) => blocks),
      sparse,
    );
    let first = 0;
    for (const { slot, head, blocks } of growth)
      this.#add(stream, slot, head, fresh.slice(first, (first += blocks)));
    return fresh;
  }

  /** Puts pairs of blocks behind those of a head. */
  #add(stream: Stream, slot: number, kvHead: number, pairs: readonly number[]): void {
    const head = this.#heads[slot]?.[kvHead];
    const first = head?.count ?? 0;
    const entries = Int32Array.from(pairs, (id) => id + 1);
    for (const map of Object.values(this.#maps)) {
      const row = map.slice('slot', slot, slot + 1).slice('kvHead', kvHead, kvHead + 1);
      stream.write(row.slice('block', first, first + pairs.length), entries);
    }
    head?.add(pairs);
  }

  #blocksFor(slot: number, tokens: number): number {
    const blocks = Math.ceil(tokens / blockTokens);
    if (blocks <= this.#tableWidth) return blocks;
    const limit = this.#tableWidth * blockTokens;
    throw new InvalidValueError(
      `Slot ${slot} would hold ${tokens} tokens; its sequence may have ${limit}. ` +
        'Open the model with a larger contextTokens.',
      { subject: 'tokens', given: tokens, wanted: limit },
    );
  }

  #isPruned(slot: number): boolean {
    return this.#heads[slot]?.some((head) => head.pruned) ?? false;
  }

  #expectShare(operand: KvOperand, share: number): void {
    const own = this.#parts.shares[operand];
    if (share <= own) return;
    throw new CapabilityError(
      `${share} of the ${operand} would be sparse in the prompt and ${own} after it in layer ${this.layer.index}; ` +
        'blocks do not become dense again. Give the store at least the sparsity of the prefill attention.',
      { subject: operand, given: share, wanted: own },
    );
  }

  #expectDense(action: string, slot: number): void {
    if (!this.#isPruned(slot)) return;
    throw new CapabilityError(
      `${this.name}: cannot ${action} slot ${slot}, blocks of which are sparse already. ` +
        'Use dense prefill attention with this store: its blocks then become sparse when the prompt is complete.',
      { subject: action, given: 'sparse blocks', wanted: 'dense blocks' },
    );
  }
}
