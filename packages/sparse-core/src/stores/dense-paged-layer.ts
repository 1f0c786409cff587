import type {
  AppendCall,
  AttentionCall,
  FinishDecode,
  KvBytes,
  KvCapacity,
  KvLayer,
  KvStore,
} from '../contracts/kv-store.js';
import { checkedCall, entriesOf, type RowBatch, type RowBatchEntry } from '../contracts/row-batch.js';
import { answersApart } from '../contracts/answers-apart.js';
import type { SelectionOutcomes, TokenSelection } from '../contracts/token-selection.js';
import { appendKv } from '../operations/append-kv.js';
import { decodeAttention } from '../operations/decode-attention.js';
import { gatherKv } from '../operations/gather-kv.js';
import type { Stream } from '../handles.js';
import type { PagedBlocks } from '../paged-blocks.js';
import type { BlockIds } from './block-ids.js';
import { countDistinct } from './count-distinct.js';
import { expectHeld } from './expect-held.js';
import { expectPrepared } from './expect-prepared.js';
import type { KvBlockPool } from './kv-block-pool.js';
import type { LayerTables } from './layer-tables.js';
import { shorterBy } from './shorter-by.js';
import { SlotBlocks } from './slot-blocks.js';
import { type BlockTable, SlotTable } from './slot-table.js';

export interface DensePagedParts {
  readonly name: string;
  readonly capacity: KvCapacity;
  readonly pool: KvBlockPool;
  /** The layer's part of the pool. */
  readonly poolBytes: number;
  /** Of all layers, and the layer's place among them. */
  readonly tables: LayerTables;
  readonly index: number;
  /** The stores of the layers that hold answers alike. */
  readonly inStep: readonly DensePagedStore[];
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** A block of the pool, and where it stands: the block of a kv head of a slot that has this index. */
interface HeldBlock {
  readonly slot: number;
  readonly kvHead: number;
  readonly index: number;
  readonly id: number;
}

/** Blocks that a kv head of a slot lacks. */
interface MissingBlocks {
  readonly slot: number;
  readonly kvHead: number;
  readonly count: number;
}

/** What entries lack in a layer: blocks, and copies of blocks. */
interface LackingBlocks {
  readonly store: DensePagedStore;
  readonly entries: readonly RowBatchEntry[];
  readonly missing: readonly MissingBlocks[];
  readonly shared: readonly HeldBlock[];
}

/** Dense keys and values of one layer, in blocks of a pool. */
export class DensePagedStore implements KvStore {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #pool: KvBlockPool;
  readonly #poolBytes: number;
  readonly #tables: LayerTables;
  readonly #index: number;
  readonly #inStep: readonly DensePagedStore[];
  readonly #close: () => void;
  readonly #answersApart: boolean;
  readonly #slots: SlotTable<SlotBlocks, 'blocks'>;
  readonly #blockTable: BlockTable;

  constructor(layer: KvLayer, { name, capacity, pool, poolBytes, tables, index, inStep, close }: DensePagedParts) {
    this.name = name;
    this.layer = layer;
    this.#pool = pool;
    this.#poolBytes = poolBytes;
    this.#tables = tables;
    this.#index = index;
    this.#inStep = inStep;
    this.#close = close;
    this.#answersApart = capacity.answersApart ?? false;
    const { blockTokens } = pool;
    const empty = (mostBlocks: number) => new SlotBlocks(layer.kvHeads, mostBlocks);
    this.#blockTable = tables.of(index);
    this.#slots = new SlotTable({ layer, capacity, blockTokens, tables: ['blocks'], empty, given: { blocks: this.#blockTable } });
  }

  /** Has `answersApart`. */
  capability(name: string): object | undefined {
    return name === answersApart.name ? this : undefined;
  }

  prepare(stream: Stream, batch: RowBatch): void {
    this.#slots.expectUsable('prepare', stream);
    const own = this.#lackingFor(entriesOf('prepare', batch));
    if (own.entries.length === 0) return;
    const isAnswers = own.entries.every(({ rows }) => rows === 1);
    const others = isAnswers ? this.#inStep.filter((store) => store !== this) : [];
    const all = [own, ...others.map((store) => store.#lackingFor(own.entries))];
    expectAvailable(all);
    try {
      for (const each of all) each.store.#makeRoom(stream, each);
    } finally {
      // Also what layers took before one of them failed.
      this.#tables.write(stream);
    }
  }

  /** The blocks of the pool, which all layers share. */
  get ids(): BlockIds {
    return this.#pool.ids;
  }

  /** How many blocks `prepare` would take. */
  blocksFor(batch: Pick<RowBatch, 'entries'>): number {
    return blocksOf(this.#lackingFor(entriesOf('prepare', batch)));
  }

  append(stream: Stream, call: AppendCall): void {
    this.#slots.expectUsable('append', stream);
    const { batch, keys, values, rope } = checkedCall('append', call);
    expectPrepared(this, batch, (slot, kvHead) => this.roomOf(slot, kvHead));
    const { slots, queryStart } = batch;
    appendKv(stream, { keys, values, blocks: this.denseBlocks(), slots, queryStart, rope });
  }

  advance(batch: RowBatch): void {
    this.#slots.advance(batch);
  }

  startDecode(stream: Stream, call: AttentionCall): FinishDecode {
    const { batch, query, output, scale } = checkedCall('startDecode', call);
    const { slots, queryStart } = batch;
    decodeAttention(stream, { query, output, blocks: this.denseBlocks(), slots, queryStart, scale, apart: this.#answersApart });
    return () => undefined;
  }

  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    this.#slots.expectUsable('keep', stream);
    expectHeld(selection, this.lengths(slot));
    const { indices, counts } = selection;
    // Tokens move to the front, in blocks that nobody else reads.
    const blocks = this.#slots.blocks(slot);
    const written = blocks.heads.flatMap((held, kvHead) =>
      Array.from(held.subarray(0, this.#blocksOf(counts[kvHead] ?? 0)), (id, index) => ({ slot, kvHead, index, id })),
    );
    const shared = this.#pool.ids.toReplace(written);
    if (shared.length > 0) {
      this.#replace(stream, shared, this.#pool.ids.allocate(shared.length));
      this.#writeTable(stream, slot);
    }
    gatherKv(stream, { blocks: this.denseBlocks(), slot, indices, counts, outcomes });
    this.#slots.count(slot, counts);
    this.#shrink(slot, counts);
  }

  truncate(stream: Stream, slot: number, tokens: number): void {
    this.#slots.expectUsable('truncate', stream);
    this.resize(stream, slot, shorterBy('truncate', this.lengths(slot), tokens));
  }

  /** The numbers of the blocks of each kv head of a slot, in order. */
  blockIds(slot: number): readonly Int32Array[] {
    return this.#slots.blocks(slot).heads;
  }

  /** Takes whole blocks out of a slot, `counts[kvHead]` of them from block `first` on, and returns their memory. */
  removeBlocks(stream: Stream, slot: number, first: number, counts: readonly number[]): void {
    this.#slots.expectUsable('removeBlocks', stream);
    const blocks = this.#slots.blocks(slot);
    counts.forEach((count, kvHead) => {
      this.#pool.ids.free(blocks.remove(kvHead, first, count));
    });
    this.#writeTable(stream, slot);
    const lengths = this.lengths(slot).map((held, kvHead) => held - (counts[kvHead] ?? 0) * this.#pool.blockTokens);
    this.#slots.write(stream, slot, lengths);
  }

  /**
   * Lets a slot hold so many tokens of each kv head. Where that is more, it is in new blocks, which are the caller's to
   * write.
   * @throws OutOfMemoryError; nothing is changed then
   */
  resize(stream: Stream, slot: number, counts: readonly number[]): void {
    this.#slots.expectUsable('resize', stream);
    const blocks = this.#slots.blocks(slot);
    const missing = counts.map((count, kvHead) => Math.max(0, this.#blocksOf(count) - blocks.count(kvHead)));
    const fresh = this.#pool.ids.allocate(missing.reduce((sum, count) => sum + count, 0));
    let first = 0;
    missing.forEach((count, kvHead) => {
      blocks.push(kvHead, fresh, first, first + count);
      first += count;
    });
    if (missing.some((count) => count > 0)) this.#writeTable(stream, slot);
    this.#slots.write(stream, slot, counts);
    this.#shrink(slot, counts);
  }

  copy(stream: Stream, fromSlot: number, toSlot: number, dropped = 0): void {
    this.#slots.expectUsable('copy', stream);
    const counts = shorterBy('copy', this.lengths(fromSlot), dropped);
    this.#slots.expectEmpty(toSlot);
    const { ids } = this.#pool;
    const source = this.#slots.blocks(fromSlot);
    const last = counts.flatMap((tokens, kvHead): HeldBlock[] => {
      const index = this.#openBlock(tokens);
      const id = index < this.#blocksOf(tokens) ? source.at(kvHead, index) : undefined;
      return id === undefined ? [] : [{ slot: toSlot, kvHead, index, id }];
    });
    const fresh = ids.allocate(last.length);
    this.#copyBlocks(stream, last, fresh);
    this.#shrink(toSlot, []);
    const blocks = this.#slots.blocks(toSlot);
    blocks.copy(source, counts.map((tokens) => this.#blocksOf(tokens)));
    counts.forEach((tokens, kvHead) => ids.share(blocks.of(kvHead, 0, this.#openBlock(tokens))));
    last.forEach(({ kvHead, index }, copy) => blocks.replace(kvHead, index, fresh[copy] ?? NaN));
    this.#writeTable(stream, toSlot);
    this.#slots.write(stream, toSlot, counts);
  }

  release(stream: Stream, slot: number): void {
    this.#slots.expectUsable('release', stream);
    this.resize(stream, slot, this.lengths(slot).map(() => 0));
  }

  lengths(slot: number): readonly number[] {
    return this.#slots.lengths(slot);
  }

  /** One of its lengths, for who asks in every step. */
  length(slot: number, kvHead: number): number {
    return this.#slots.length(slot, kvHead);
  }

  denseBlocks(slots?: readonly number[]): PagedBlocks {
    if (slots !== undefined) this.#slots.allBlocks(slots);
    const { keys, values } = this.#pool;
    return { keys, values, blockTable: this.#blockTable, keyCounts: this.#slots.keyCounts };
  }

  bytes(slots?: readonly number[]): KvBytes {
    const blocks = countDistinct(this.#slots.allBlocks(slots).flatMap(({ heads }) => heads));
    return { device: blocks * this.#pool.blockBytes, host: 0 };
  }

  reserved(): KvBytes {
    return { device: this.#poolBytes + this.#slots.byteLength, host: 0 };
  }

  dispose(): void {
    if (this.#slots.disposed) return;
    for (const { heads } of this.#slots.allBlocks()) for (const ids of heads) this.#pool.ids.free(ids);
    this.#slots.dispose();
    this.#close();
  }

  /** What rows lack that are not known to fit: blocks, and copies in the place of those that others hold too. */
  #lackingFor(all: readonly RowBatchEntry[]): LackingBlocks {
    const entries = all.filter(({ slot, rows }) => !this.#slots.hasRoom(slot, rows));
    if (entries.length === 0) return { store: this, entries, missing: [], shared: [] };
    const missing: MissingBlocks[] = [];
    const written: HeldBlock[] = [];
    const { ids, blockTokens } = this.#pool;
    for (const { slot, rows } of entries) {
      const blocks = this.#slots.blocks(slot);
      const lengths = this.lengths(slot);
      // A loop: every layer comes here with every sequence of a step.
      for (let kvHead = 0; kvHead < lengths.length; kvHead++) {
        const held = lengths[kvHead] ?? 0;
        const count = blocks.count(kvHead);
        if (held + rows > count * blockTokens) {
          missing.push({ slot, kvHead, count: this.#slots.blocksFor(slot, held + rows) - count });
        }
        if (ids.shared === 0) continue;
        const index = this.#openBlock(held);
        const id = blocks.at(kvHead, index);
        if (id !== undefined && ids.holders(id) > 1) written.push({ slot, kvHead, index, id });
      }
    }
    return { store: this, entries, missing, shared: ids.toReplace(written) };
  }

  #makeRoom(stream: Stream, { entries, missing, shared }: LackingBlocks): void {
    const { ids } = this.#pool;
    if (shared.length > 0) {
      this.#replace(stream, shared, ids.allocate(shared.length));
      for (const slot of new Set(shared.map(({ slot }) => slot))) this.#writeTable(stream, slot);
    }
    const fresh = ids.allocate(missing.reduce((sum, { count }) => sum + count, 0));
    let first = 0;
    for (const { slot, kvHead, count } of missing) {
      const blocks = this.#slots.blocks(slot);
      this.#tables.set(this.#index, slot, kvHead, blocks.count(kvHead), fresh, first, first + count);
      blocks.push(kvHead, fresh, first, first + count);
      first += count;
    }
    for (const { slot } of entries) this.#slots.keepRoom(slot, this.#roomFor(slot));
  }

  /** How many blocks so many tokens take. */
  #blocksOf(tokens: number): number {
    return Math.ceil(tokens / this.#pool.blockTokens);
  }

  /** The block that the next token goes to. */
  #openBlock(tokens: number): number {
    return Math.floor(tokens / this.#pool.blockTokens);
  }

  /** How many tokens the blocks have room for; none more than there are where others hold the open block too. */
  roomOf(slot: number, kvHead: number): number {
    const blocks = this.#slots.blocks(slot);
    const held = this.lengths(slot)[kvHead] ?? 0;
    const open = blocks.at(kvHead, this.#openBlock(held));
    if (open !== undefined && this.#pool.ids.holders(open) > 1) return held;
    return blocks.count(kvHead) * this.#pool.blockTokens;
  }

  /** Rows that fit behind what a slot holds: as many as in the fullest of its kv heads. */
  #roomFor(slot: number): number {
    const lengths = this.lengths(slot);
    let room = Infinity;
    for (let kvHead = 0; kvHead < lengths.length; kvHead++) room = Math.min(room, this.roomOf(slot, kvHead) - (lengths[kvHead] ?? 0));
    return room;
  }

  /** Frees the blocks behind so many tokens of each kv head. */
  #shrink(slot: number, counts: readonly number[]): void {
    const blocks = this.#slots.blocks(slot);
    for (let kvHead = 0; kvHead < this.layer.kvHeads; kvHead++) {
      this.#pool.ids.free(blocks.cut(kvHead, this.#blocksOf(counts[kvHead] ?? 0)));
    }
  }

  /** Puts copies in the place of blocks: the first of the `fresh` ones. */
  #replace(stream: Stream, replaced: readonly HeldBlock[], fresh: Int32Array): void {
    this.#copyBlocks(stream, replaced, fresh);
    replaced.forEach(({ slot, kvHead, index }, copy) => {
      this.#slots.blocks(slot).replace(kvHead, index, fresh[copy] ?? NaN);
    });
    this.#pool.ids.free(Int32Array.from(replaced, ({ id }) => id));
  }

  /** Copies blocks onto the first of the `fresh` ones. These are free again if that throws. */
  #copyBlocks(stream: Stream, blocks: readonly HeldBlock[], fresh: Int32Array): void {
    if (blocks.length === 0) return;
    try {
      this.#pool.copy(stream, blocks.map(({ id }) => id), [...fresh.subarray(0, blocks.length)]);
    } catch (error) {
      this.#pool.ids.free(fresh);
      throw error;
    }
  }

  #writeTable(stream: Stream, slot: number): void {
    this.#slots.writeTable(stream, 'blocks', slot, this.#slots.blocks(slot).table);
  }
}

function blocksOf({ missing, shared }: LackingBlocks): number {
  return missing.reduce((sum, { count }) => sum + count, shared.length);
}

/** @throws OutOfMemoryError unless the pools have what all of these layers lack */
function expectAvailable(all: readonly LackingBlocks[]): void {
  const needed = new Map<BlockIds, number>();
  for (const each of all) needed.set(each.store.ids, (needed.get(each.store.ids) ?? 0) + blocksOf(each));
  for (const [ids, count] of needed) ids.expectAvailable(count);
}
