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
  type KvBytes,
  type KvCapacity,
  type KvLayer,
  type KvStore,
  type PagedBlocks,
  prefillAttention,
  type RowBatch,
  type SelectionOutcomes,
  type Stream,
  type TokenSelection,
} from '@kv/sparse-core';
import {
  checkedCall,
  countDistinct,
  entriesOf,
  expectHeld,
  expectPrepared,
  joinedIds,
  nativeOf,
  shorterBy,
  SlotTable,
} from '@kv/sparse-core/native';
import { allDense, anySparse, type Shares } from '../block-sparsity.js';
import { blockTokens, type KvOperand, operands } from '../blocks-24.js';
import { copyIndexMap } from '../operations/copy-index-map.js';
import { decodeAttention24 } from '../operations/decode-attention-24.js';
import { prefillAttention24 } from '../operations/prefill-attention-24.js';
import { type SparsePrompts, sparsePrompts } from '../sparse-prompts.js';
import { BlockChanges24, type ChangeParts, type Growth } from './block-changes-24.js';
import { HeadBlocks } from './head-blocks.js';
import { sumOfNeeds } from './block-pools-24.js';
import type { WrittenBlocks } from './replace-shared.js';

export interface StoreParts extends ChangeParts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  /** The layer's part of the pools. */
  readonly poolBytes: number;
  /** What of the layer is sparse while a prompt is read, and after it. */
  readonly prompt: Shares;
  readonly after: Shares;
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** Keys and values of one layer in dense and 2:4 sparse blocks. */
export class BlockStore24 implements KvStore, SparsePrompts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #parts: StoreParts;
  readonly #slots: SlotTable<readonly HeadBlocks[], KvOperand>;
  readonly #changes: BlockChanges24;

  constructor(parts: StoreParts) {
    const { layer, capacity } = parts;
    this.name = parts.name;
    this.layer = layer;
    this.#parts = parts;
    const empty = () => Array.from({ length: layer.kvHeads }, () => new HeadBlocks(parts));
    this.#slots = new SlotTable({ layer, capacity, blockTokens, tables: operands, empty });
    this.#changes = new BlockChanges24(parts, this.#slots);
  }

  /** Blocks that have left the local window since, of answers too, become candidates first. */
  prepare(stream: Stream, batch: RowBatch): void {
    this.#expectPrunable(stream);
    const entries = entriesOf('prepare', batch);
    this.#changes.prune(
      stream,
      entries.map(({ slot }) => slot),
    );
    const growth: Growth[] = [];
    const written: WrittenBlocks[] = [];
    const { prompt, after } = this.#parts;
    for (const { slot, rows } of entries) {
      const lengths = this.lengths(slot);
      this.#slots.blocks(slot).forEach((head, kvHead) => {
        const held = lengths[kvHead] ?? 0;
        const blocks = this.#slots.blocksFor(slot, held + rows) - head.count;
        if (blocks > 0) growth.push({ slot, kvHead, blocks });
        // The step may end in prunings, behind which nothing may fail for want of room.
        const moved = head.movedBy(this.#changes.rangeEnd(held + rows), [prompt, after]);
        const open = head.sharedPairOf(Math.floor(held / blockTokens));
        const apart = open !== undefined && !moved.some(({ kind, id }) => kind === 'pair' && id === open.id);
        for (const blocksOf of apart ? [open, ...moved] : moved) written.push({ slot, head, ...blocksOf });
      });
    }
    this.#changes.grow(stream, growth, written);
  }

  append(stream: Stream, call: AppendCall): void {
    this.#expectUsable(stream);
    const { batch, keys, values, rope } = checkedCall('append', call);
    expectPrepared(this, batch, (slot, kvHead) => this.#roomOf(slot, kvHead));
    // What is appended to is dense, under one number for keys and values.
    const { slots, queryStart } = batch;
    appendKv(stream, { keys, values, blocks: this.#asDense(), slots, queryStart, rope });
  }

  advance(batch: RowBatch): void {
    this.#slots.advance(batch);
  }

  /**
   * Attention of the rows of prompts over all that their slots hold, of which this share is made sparse first.
   * @throws CapabilityError unless the store was made for prompts of this sparsity
   */
  attend(stream: Stream, call: AttentionCall, sparsity: Shares = allDense): void {
    this.#expectPrompts(sparsity);
    this.#expectPrunable(stream);
    const { batch, query, output, scale } = checkedCall('attend', call);
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale, causal: true };
    const all = batch.entries.map(({ slot }) => slot);
    this.#changes.prune(stream, all, sparsity);
    const blocks = this.denseBlocks(all);
    if (blocks === undefined) prefillAttention24(stream, { ...rows, ...this.#cache24() });
    else prefillAttention(stream, { ...rows, blocks });
  }

  capability(name: string): SparsePrompts | undefined {
    return name === sparsePrompts.name ? this : undefined;
  }

  startDecode(stream: Stream, call: AttentionCall): FinishDecode {
    const { batch, query, output, scale } = checkedCall('startDecode', call);
    const { slots, queryStart } = batch;
    const rows = { query, output, slots, queryStart, scale };
    if (this.#alwaysDense) decodeAttention(stream, { ...rows, blocks: this.#asDense() });
    else decodeAttention24(stream, { ...rows, ...this.#cache24() });
    return () => undefined;
  }

  makeDense(stream: Stream, slot: number): Promise<() => void> | undefined {
    this.#expectUsable(stream);
    // Where prompts are sparse there are not enough dense blocks.
    if (!this.#isPruned(slot) || anySparse(this.#parts.prompt)) return undefined;
    const read = (operand: KvOperand) => this.#slots.tables[operand].slice('slot', slot, slot + 1).read(stream);
    return Promise.all([read('keys'), read('values')]).then(
      ([keys, values]) =>
        () =>
          this.#changes.makeDense(stream, slot, { keys, values }),
    );
  }

  /** @throws CapabilityError when blocks of the slot are sparse: tokens can be dropped before, not after */
  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    this.#expectDense('keep', slot);
    expectHeld(selection, this.lengths(slot));
    const { indices, counts } = selection;
    const heads = this.#slots.blocks(slot);
    const blocks = counts.map((count) => Math.ceil(count / blockTokens));
    // Tokens move to the front, in blocks that nobody else reads.
    const front = (head: HeadBlocks, kvHead: number) => head.pairsBelow(blocks[kvHead] ?? 0);
    this.#changes.grow(
      stream,
      [],
      heads.flatMap((head, kvHead) => front(head, kvHead).map((pair) => ({ slot, head, ...pair }))),
    );
    gatherKv(stream, { blocks: this.#asDense(), slot, indices, counts, outcomes });
    this.#slots.count(slot, counts);
    heads.forEach((head, kvHead) => head.truncate(blocks[kvHead] ?? 0));
  }

  /** @throws CapabilityError when it would reach into blocks that may be sparse */
  truncate(stream: Stream, slot: number, tokens: number): void {
    this.#expectUsable(stream);
    const counts = shorterBy('truncate', this.lengths(slot), tokens);
    this.#expectUncut('truncate', slot, counts);
    this.#slots.write(stream, slot, counts);
    this.#slots.blocks(slot).forEach((head, kvHead) => head.truncate(Math.ceil((counts[kvHead] ?? 0) / blockTokens)));
  }

  finishPrefill(stream: Stream, slot: number): void {
    this.#expectPrunable(stream);
    for (const head of this.#slots.blocks(slot)) head.finish();
    this.#changes.prune(stream, [slot]);
  }

  /** @throws CapabilityError when what is dropped reaches into blocks that may be sparse */
  copy(stream: Stream, fromSlot: number, toSlot: number, dropped = 0): void {
    this.#expectUsable(stream);
    const counts = shorterBy('copy', this.lengths(fromSlot), dropped);
    this.#slots.expectEmpty(toSlot);
    this.#expectUncut('copy a part of', fromSlot, counts);
    const { pools } = this.#parts;
    const source = this.#slots.blocks(fromSlot);
    const blocks = counts.map((count) => Math.ceil(count / blockTokens));
    pools.expectUnpromised(sumOfNeeds(source.map((head, kvHead) => head.needsOfCopy(blocks[kvHead] ?? 0))));
    // Full blocks are shared; the last one of each kv head is copied if it is not full.
    const last = source.map((head, kvHead) => {
      const full = Math.floor((counts[kvHead] ?? 0) / blockTokens);
      return full === blocks[kvHead] ? undefined : head.pairAt(full);
    });
    const copied = Int32Array.from(last.filter((pair) => pair !== undefined));
    const pairs = pools.allocatePairs(copied.length);
    const inBoth = (of: Int32Array) => joinedIds(...operands.map((operand) => pools.placesOf(operand, of)));
    const dense = { from: inBoth(copied), to: inBoth(pairs) };
    try {
      copyBlocks(stream, { pool: pools.dense, ...dense });
      copyIndexMap(stream, { ...this.#slots.tables, fromSlot, toSlot, dense, sparse: { from: [], to: [] } });
    } catch (error) {
      pools.freePairs(pairs);
      throw error;
    }
    const others = pairs.values();
    source.forEach((from, kvHead) => {
      const head = this.#slots.blocks(toSlot)[kvHead];
      head?.release();
      head?.copy(from, blocks[kvHead] ?? 0, last[kvHead] === undefined ? undefined : others.next().value);
    });
    this.#slots.write(stream, toSlot, counts);
  }

  release(stream: Stream, slot: number): void {
    this.#expectUsable(stream);
    const heads = this.#slots.blocks(slot);
    this.#slots.write(
      stream,
      slot,
      heads.map(() => 0),
    );
    for (const head of heads) head.release();
  }

  lengths(slot: number): readonly number[] {
    return this.#slots.lengths(slot);
  }

  denseBlocks(slots?: readonly number[]): PagedBlocks | undefined {
    return this.#slots.allBlocks(slots).flat().some(({ pruned }) => pruned) ? undefined : this.#asDense();
  }

  /** Of the blocks, and of the two entries of the index maps for each (equations 5a to 5d). */
  bytes(slots?: readonly number[]): KvBytes {
    const heads = this.#slots.allBlocks(slots).flat();
    const { denseBytes, sparseBytes } = this.#parts.pools;
    const dense = countDistinct(heads.map(({ places }) => places));
    const sparseOf = (operand: KvOperand) => countDistinct(heads.map((head) => head.sparseIds(operand)));
    const entries = 2 * heads.reduce((sum, { count }) => sum + count, 0);
    const sparse = sparseOf('keys') + sparseOf('values');
    return { device: dense * denseBytes + sparse * sparseBytes + entries * Int32Array.BYTES_PER_ELEMENT, host: 0 };
  }

  reserved(): KvBytes {
    const masks = Object.values(this.#parts.masks).map(({ kept }) => kept);
    const own = this.#parts.poolBytes + this.#slots.byteLength;
    return { device: masks.reduce((sum, tensor) => sum + tensor.byteLength, own), host: 0 };
  }

  dispose(): void {
    if (this.#slots.disposed) return;
    for (const head of this.#slots.allBlocks().flat()) head.release();
    this.#slots.dispose();
    for (const mask of Object.values(this.#parts.masks)) mask.dispose();
    this.#parts.close();
  }

  get #alwaysDense(): boolean {
    return !anySparse(this.#parts.after);
  }

  /** The cache under one table, right wherever nothing is sparse. */
  #asDense(): PagedBlocks {
    const { keys, values } = this.#parts.pools.paired;
    return { keys, values, blockTable: this.#slots.tables.keys, keyCounts: this.#slots.keyCounts };
  }

  #cache24() {
    const { after } = this.#parts;
    return {
      keys: this.#changes.blocks24('keys'),
      values: this.#changes.blocks24('values'),
      keyCounts: this.#slots.keyCounts,
      sparseKeys: after.keys > 0,
      sparseValues: after.values > 0,
    };
  }

  /** Known before anything changes. @throws DeviceError, DisposedError */
  #expectUsable(stream: Stream): void {
    if (this.#slots.disposed) {
      throw new DisposedError(
        `The store '${this.name}' of layer ${this.layer.index} was disposed; keep it until its last use is enqueued.`,
        { subject: 'store' },
      );
    }
    nativeOf(this.name, 'the store', this.#slots.keyCounts, stream);
  }

  /** Losses are the caller's, who may have disposed them. @throws DeviceError, DisposedError */
  #expectPrunable(stream: Stream): void {
    this.#expectUsable(stream);
    for (const loss of Object.values(this.#parts.losses)) nativeOf(this.name, 'blockLoss', loss, stream);
  }

  /** How many tokens the blocks have room for; none more than there are where other slots hold the last one too. */
  #roomOf(slot: number, kvHead: number): number {
    const held = this.lengths(slot)[kvHead] ?? 0;
    const head = this.#slots.blocks(slot)[kvHead];
    if (head?.sharedPairOf(Math.floor(held / blockTokens)) !== undefined) return held;
    return (head?.count ?? 0) * blockTokens;
  }

  #isPruned(slot: number): boolean {
    return this.#slots.blocks(slot).some((head) => head.pruned);
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

  /** @throws CapabilityError when a kv head would lose tokens of blocks that may be sparse */
  #expectUncut(action: string, slot: number, counts: readonly number[]): void {
    this.#slots.blocks(slot).forEach(({ sparseEnd }, kvHead) => {
      const count = counts[kvHead] ?? 0;
      if (count >= sparseEnd) return;
      throw new CapabilityError(
        `${this.name}: cannot ${action} slot ${slot}, of which kv head ${kvHead} would keep ${count} tokens: the first ` +
          `${sparseEnd} are in blocks that may be sparse, and these are whole or not at all. Keep at least as many, or ` +
          'read the text again.',
        { subject: action, given: count, wanted: sparseEnd },
      );
    });
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
