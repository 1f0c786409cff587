import {
  appendKv,
  type AppendCall,
  type AttentionCall,
  CapabilityError,
  copyBlocks,
  decodeAttention,
  DisposedError,
  type FinishDecode,
  gatherKv,
  InvalidValueError,
  type KvBytes,
  type KvCapacity,
  type KvLayer,
  type KvStore,
  type PagedBlocks,
  prefillAttention,
  type RowBatch,
  type SelectionOutcomes,
  type Stream,
  type Tensor,
  type TokenSelection,
} from '@kv/sparse-core';
import { expectHeld, expectPrepared, nativeOf, shorterBy, zeroTable } from '@kv/sparse-core/native';
import { allDense, anySparse, type Shares } from '../block-sparsity.js';
import type { ElementMask } from '../element-mask.js';
import { type BlockLoss, blockTokens, denseEntry, type KvOperand, type MixedBlocks, operands } from '../mixed-blocks.js';
import { compress24 } from '../operations/compress-24.js';
import { copyIndexMap } from '../operations/copy-index-map.js';
import { mixedDecodeAttention } from '../operations/mixed-decode-attention.js';
import { mixedPrefillAttention } from '../operations/mixed-prefill-attention.js';
import { enqueueDense } from './enqueue-dense.js';
import { type SparsePrompts, sparsePrompts } from '../sparse-prompts.js';
import { type CopiesOfPools, HeadBlocks } from './head-blocks.js';
import { type MixedBlockPools, sumOfNeeds } from './mixed-block-pools.js';

type IndexMap = Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;

/** Blocks that a kv head of a slot needs more. */
interface Growth {
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
  readonly pairs: readonly number[];
}

export interface StoreParts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  readonly pools: MixedBlockPools;
  /** The layer's part of the pools. */
  readonly poolBytes: number;
  /** What of the layer is sparse while a prompt is read, and after it. */
  readonly prompt: Shares;
  readonly after: Shares;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
  readonly masks: Partial<Record<KvOperand, ElementMask>>;
  /** Of the shape of the index maps. */
  readonly losses: Partial<Record<KvOperand, BlockLoss>>;
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** Keys and values of one layer in dense and 2:4 sparse blocks. */
export class MixedBlockStore implements KvStore, SparsePrompts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #parts: StoreParts;
  readonly #tableWidth: number;
  readonly #maps: Record<KvOperand, IndexMap>;
  readonly #keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  readonly #heads: HeadBlocks[][];
  readonly #counts: number[][];

  constructor(parts: StoreParts) {
    const { layer, capacity } = parts;
    const { device, slots, tokensPerSlot } = capacity;
    this.name = parts.name;
    this.layer = layer;
    this.#parts = parts;
    this.#tableWidth = Math.ceil(tokensPerSlot / blockTokens);
    const made: Disposable[] = [];
    const keep = <T extends Disposable>(table: T): T => {
      made.push(table);
      return table;
    };
    const map = () => keep(zeroTable(device, ['slot', 'kvHead', 'block'], [slots, layer.kvHeads, this.#tableWidth]));
    try {
      this.#maps = { keys: map(), values: map() };
      this.#keyCounts = zeroTable(device, ['slot', 'kvHead'], [slots, layer.kvHeads]);
    } catch (error) {
      for (const each of made) each[Symbol.dispose]();
      throw error;
    }
    const perHead = <T>(value: () => T) => Array.from({ length: layer.kvHeads }, value);
    this.#heads = Array.from({ length: slots }, () => perHead(() => new HeadBlocks(parts)));
    this.#counts = Array.from({ length: slots }, () => perHead(() => 0));
  }

  /** Blocks that have left the local window since, of answers too, become candidates first. */
  prepare(stream: Stream, batch: RowBatch): void {
    this.#expectPrunable(stream);
    this.#prune(
      stream,
      batch.entries.map(({ slot }) => slot),
    );
    const missing: Growth[] = [];
    for (const { slot, rows } of batch.entries) {
      this.#headsOf(slot).forEach((head, kvHead) => {
        const blocks = this.#blocksFor(slot, (this.lengths(slot)[kvHead] ?? 0) + rows) - head.count;
        if (blocks > 0) missing.push({ slot, kvHead, blocks });
      });
    }
    this.#grow(stream, missing);
  }

  append(stream: Stream, { batch, keys, values }: AppendCall): void {
    this.#expectUsable(stream);
    expectPrepared(this, batch, (slot, kvHead) => (this.#headsOf(slot)[kvHead]?.count ?? 0) * blockTokens);
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
   * Attention of the rows of prompts over all that their slots hold, of which this share is made sparse first.
   * @throws CapabilityError unless the store was made for prompts of this sparsity
   */
  attend(stream: Stream, { batch, query, output, scale }: AttentionCall, sparsity: Shares = allDense): void {
    this.#expectPrompts(sparsity);
    this.#expectPrunable(stream);
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale, causal: true };
    const all = batch.entries.map(({ slot }) => slot);
    this.#prune(stream, all, sparsity);
    const blocks = this.denseBlocks(all);
    if (blocks === undefined) mixedPrefillAttention(stream, { ...rows, ...this.#mixedCache() });
    else prefillAttention(stream, { ...rows, blocks });
  }

  capability(name: string): SparsePrompts | undefined {
    return name === sparsePrompts.name ? this : undefined;
  }

  startDecode(stream: Stream, { batch, query, output, scale }: AttentionCall): FinishDecode {
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale };
    if (this.#alwaysDense) decodeAttention(stream, { ...rows, blocks: this.#asDense() });
    else mixedDecodeAttention(stream, { ...rows, ...this.#mixedCache() });
    return () => undefined;
  }

  makeDense(stream: Stream, slot: number): Promise<() => void> | undefined {
    // Where prompts are sparse there are not enough dense blocks.
    if (!this.#isPruned(slot) || anySparse(this.#parts.prompt)) return undefined;
    this.#expectUsable(stream);
    const read = (operand: KvOperand) => this.#maps[operand].slice('slot', slot, slot + 1).read(stream);
    return Promise.all([read('keys'), read('values')]).then(
      ([keys, values]) =>
        () =>
          this.#makeDense(stream, slot, { keys, values }),
    );
  }

  /** @throws CapabilityError when blocks of the slot are sparse: tokens can be dropped before, not after */
  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    this.#expectDense('keep', slot);
    expectHeld(selection, this.lengths(slot));
    const { indices, counts } = selection;
    gatherKv(stream, { blocks: this.#asDense(), slot, indices, counts, outcomes });
    this.#counts[slot] = [...counts];
    counts.forEach((count, head) => this.#heads[slot]?.[head]?.truncate(Math.ceil(count / blockTokens)));
  }

  /** @throws CapabilityError when it would reach into blocks that may be sparse */
  truncate(stream: Stream, slot: number, tokens: number): void {
    this.#expectUsable(stream);
    const counts = shorterBy(this.lengths(slot), tokens);
    const heads = this.#headsOf(slot);
    if (heads.some((head, kvHead) => (counts[kvHead] ?? 0) < head.sparseEnd)) this.#expectDense('truncate', slot);
    stream.write(this.#keyCounts.slice('slot', slot, slot + 1), Int32Array.from(counts));
    this.#counts[slot] = counts;
    heads.forEach((head, kvHead) => head.truncate(Math.ceil((counts[kvHead] ?? 0) / blockTokens)));
  }

  finishPrefill(stream: Stream, slot: number): void {
    this.#expectPrunable(stream);
    for (const head of this.#headsOf(slot)) head.finish();
    this.#prune(stream, [slot]);
  }

  copy(stream: Stream, fromSlot: number, toSlot: number): void {
    this.#expectUsable(stream);
    const [from, to] = [this.#headsOf(fromSlot), this.#headsOf(toSlot)];
    if (this.lengths(toSlot).some((count) => count > 0)) {
      throw new InvalidValueError(
        `Slot ${toSlot} holds tokens; copy into an empty one, or release it first.`,
        { subject: 'toSlot', given: toSlot },
      );
    }
    const { pools } = this.#parts;
    const copies = from.map((head, kvHead) => {
      const blocks = Math.ceil((this.lengths(fromSlot)[kvHead] ?? 0) / blockTokens);
      return { head, target: to[kvHead], blocks, pairs: head.pairsToCopy(blocks) };
    });
    pools.expectUnpromised(sumOfNeeds(copies.map(({ target, blocks }) => target?.needs(blocks))));
    const pairs = pools.pairIds.allocate(copies.reduce((sum, copy) => sum + copy.pairs, 0));
    const moves: CopiesOfPools = { dense: { from: [], to: [] }, keys: { from: [], to: [] }, values: { from: [], to: [] } };
    for (const { head, target, blocks, ...copy } of copies) {
      target?.copy(head, blocks, pairs.splice(0, copy.pairs), moves);
    }
    try {
      copyBlocks(stream, { pool: pools.dense, ...moves.dense });
      for (const operand of operands) {
        const { nonZeros, metadata } = pools.sparse[operand];
        for (const tensor of [nonZeros, metadata]) {
          copyBlocks(stream, { pool: tensor.view(['block', 'element'], tensor.shape), ...moves[operand] });
        }
        const table = this.#maps[operand];
        copyIndexMap(stream, { table, fromSlot, toSlot, dense: moves.dense, sparse: moves[operand] });
      }
      const countsOf = (slot: number) => this.#keyCounts.slice('slot', slot, slot + 1);
      stream.copy(countsOf(fromSlot), countsOf(toSlot));
    } catch (error) {
      this.release(stream, toSlot);
      throw error;
    }
    this.#counts[toSlot] = [...this.lengths(fromSlot)];
  }

  release(stream: Stream, slot: number): void {
    this.#expectUsable(stream);
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

  reserved(): KvBytes {
    const { keys, values } = this.#maps;
    const masks = Object.values(this.#parts.masks).map(({ kept }) => kept);
    const own = [keys, values, this.#keyCounts, ...masks];
    return { device: own.reduce((sum, tensor) => sum + tensor.byteLength, this.#parts.poolBytes), host: 0 };
  }

  dispose(): void {
    if (this.#keyCounts.disposed) return;
    for (const head of this.#heads.flat()) head.release();
    for (const tensor of [this.#maps.keys, this.#maps.values, this.#keyCounts]) tensor.dispose();
    for (const mask of Object.values(this.#parts.masks)) mask.dispose();
    this.#parts.close();
  }

  get #alwaysDense(): boolean {
    return !anySparse(this.#parts.after);
  }

  /** The cache under one table, right wherever nothing is sparse. */
  #asDense(): PagedBlocks {
    const { keys, values } = this.#parts.pools.paired;
    return { keys, values, blockTable: this.#maps.keys, keyCounts: this.#keyCounts };
  }

  #mixed(operand: KvOperand): MixedBlocks {
    const { dense, sparse } = this.#parts.pools;
    return { dense, sparse: sparse[operand], table: this.#maps[operand] };
  }

  #mixedCache() {
    const { after } = this.#parts;
    return {
      keys: this.#mixed('keys'),
      values: this.#mixed('values'),
      keyCounts: this.#keyCounts,
      sparseKeys: after.keys > 0,
      sparseValues: after.values > 0,
    };
  }

  /** Known before anything changes. @throws DeviceError, DisposedError */
  #expectUsable(stream: Stream): void {
    if (this.#keyCounts.disposed) {
      throw new DisposedError(
        `The store '${this.name}' of layer ${this.layer.index} was disposed; keep it until its last use is enqueued.`,
        { subject: 'store' },
      );
    }
    nativeOf(this.name, 'the store', this.#keyCounts, stream);
  }

  /** Losses are the caller's, who may have disposed them. @throws DeviceError, DisposedError */
  #expectPrunable(stream: Stream): void {
    this.#expectUsable(stream);
    for (const loss of Object.values(this.#parts.losses)) nativeOf(this.name, 'blockLoss', loss, stream);
  }

  /** Brings the full blocks of slots, between sinks and local window, to a sparsity; default: to what theirs is now. */
  #prune(stream: Stream, slots: readonly number[], sparsity?: Shares): void {
    const { localWindow, masks, losses } = this.#parts;
    const extensions: Extension[] = [];
    for (const slot of slots) {
      for (const [kvHead, blocks] of this.#headsOf(slot).entries()) {
        const endBlock = Math.floor(((this.#counts[slot]?.[kvHead] ?? 0) - localWindow) / blockTokens);
        const shares = sparsity ?? blocks.shares;
        if (blocks.settled(endBlock, shares)) continue;
        const firstBlock = blocks.endBlock;
        extensions.push({ slot, kvHead, blocks, shares, firstBlock, pairs: blocks.extendRange(endBlock) });
      }
    }
    for (const operand of operands) {
      this.#place(stream, operand, extensions);
      const prunings = extensions.flatMap(({ slot, kvHead, blocks, shares }) => {
        const pruning = blocks.prune(operand, shares[operand]);
        return pruning === undefined ? [] : [{ slot, kvHead, ...pruning }];
      });
      if (prunings.length === 0) continue;
      const [elementMask, blockLoss] = [masks[operand], losses[operand]];
      compress24(stream, { operand, blocks: this.#mixed(operand), prunings, elementMask, blockLoss });
    }
  }

  /** Lets the new candidates leave their pairs, those that may stay dense for singles. */
  #place(stream: Stream, operand: KvOperand, extensions: readonly Extension[]): void {
    const { pools } = this.#parts;
    const from: number[][] = [];
    const to: number[][] = [];
    for (const { slot, kvHead, blocks, shares, firstBlock, pairs } of extensions) {
      if (pairs.length === 0) continue;
      const places = pools.placesOf(operand, pairs);
      if (!blocks.needsSingle(shares[operand])) {
        blocks.place(operand, places);
        continue;
      }
      const singles = pools.allocateSingles(pairs.length);
      blocks.place(operand, singles);
      this.#map(stream, operand, { slot, kvHead, firstBlock }, singles.map(denseEntry));
      from.push(places);
      to.push(singles);
    }
    if (from.length === 0) return;
    copyBlocks(stream, { pool: pools.dense, from: from.flat(), to: to.flat() });
    pools.freeDense(from.flat());
  }

  /**
   * Puts new pairs of blocks behind those of heads.
   * @throws OutOfMemoryError when there is no room for them, dense now or sparse later; nothing changes then
   */
  #grow(stream: Stream, growth: readonly Growth[]): void {
    if (growth.length === 0) return;
    const { pools } = this.#parts;
    const headOf = ({ slot, kvHead }: Growth) => this.#headsOf(slot)[kvHead];
    pools.expectUnpromised(sumOfNeeds(growth.map((one) => headOf(one)?.needs(one.blocks))));
    const fresh = pools.pairIds.allocate(growth.reduce((total, { blocks }) => total + blocks, 0));
    for (const one of growth) {
      const pairs = fresh.splice(0, one.blocks);
      const head = headOf(one);
      const place = { ...one, firstBlock: head?.count ?? 0 };
      for (const operand of operands) {
        this.#map(stream, operand, place, pools.placesOf(operand, pairs).map(denseEntry));
      }
      head?.add(pairs);
    }
  }

  #makeDense(stream: Stream, slot: number, maps: Record<KvOperand, Int32Array>): void {
    const { pools, sinkBlocks: firstBlock } = this.#parts;
    for (const [kvHead, head] of this.#headsOf(slot).entries()) {
      if (!head.pruned) continue;
      const pairs = pools.pairIds.allocate(head.endBlock - firstBlock);
      for (const operand of operands) {
        const row = kvHead * this.#tableWidth;
        const entries = maps[operand].subarray(row + firstBlock, row + head.endBlock);
        const places = pools.placesOf(operand, pairs);
        enqueueDense(stream, pools, operand, entries, places);
        this.#map(stream, operand, { slot, kvHead, firstBlock }, places.map(denseEntry));
      }
      head.makeDense(pairs);
    }
  }

  /** Writes entries of an index map, from a block of a sequence on. */
  #map(stream: Stream, operand: KvOperand, { slot, kvHead, firstBlock }: Place, entries: readonly number[]): void {
    if (entries.length === 0) return;
    const row = this.#maps[operand].slice('slot', slot, slot + 1).slice('kvHead', kvHead, kvHead + 1);
    stream.write(row.slice('block', firstBlock, firstBlock + entries.length), Int32Array.from(entries));
  }

  #headsOf(slot: number): readonly HeadBlocks[] {
    this.lengths(slot);
    return this.#heads[slot] ?? [];
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
    return this.#headsOf(slot).some((head) => head.pruned);
  }

  #expectPrompts(sparsity: Shares): void {
    const { prompt } = this.#parts;
    if (operands.every((operand) => prompt[operand] === sparsity[operand])) return;
    throw new CapabilityError(
      `Layer ${this.layer.index} has room for prompts of S_K = ${prompt.keys}, S_V = ${prompt.values}, and these have ` +
        `S_K = ${sparsity.keys}, S_V = ${sparsity.values}. Make the store with this prefill attention in its capacity.`,
      { subject: 'prefill', given: sparsity, wanted: prompt },
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
