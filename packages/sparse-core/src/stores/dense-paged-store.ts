import type {
  AppendCall,
  AttentionCall,
  FinishDecode,
  KvBytes,
  KvCapacity,
  KvLayer,
  KvStore,
  KvStoreFactory,
} from '../contracts/kv-store.js';
import type { RowBatch } from '../contracts/row-batch.js';
import type { SelectionOutcomes, TokenSelection } from '../contracts/token-selection.js';
import type { FloatDType } from '../dtype.js';
import { InvalidValueError } from '../errors.js';
import { appendKv } from '../operations/append-kv.js';
import { copyBlocks } from '../operations/copy-blocks.js';
import { decodeAttention } from '../operations/decode-attention.js';
import { gatherKv } from '../operations/gather-kv.js';
import type { PagedBlocks } from '../paged-blocks.js';
import type { Stream } from '../stream.js';
import type { Tensor } from '../tensor.js';
import { show } from '../show.js';
import { floats } from '../tensor-rules.js';
import { expectObject, expectThat, nativeOf } from '../validate.js';
import { expectCapacity } from './expect-capacity.js';
import { expectHeld } from './expect-held.js';
import { expectPrepared } from './expect-prepared.js';
import { KvBlockPool } from './kv-block-pool.js';
import { shorterBy } from './shorter-by.js';
import { zeroTable } from './zero-table.js';

export interface DensePagedOptions {
  /** Element type of the cache. Default: that of the rows if it has 16 bits, else f16. */
  readonly dtype?: FloatDType | undefined;
  /** Consecutive tokens of one kv head in a block. Default: 64. */
  readonly blockTokens?: number | undefined;
}

/** Dense keys and values in blocks of one pool that all layers share. */
export function densePagedStore(options: DensePagedOptions = {}): KvStoreFactory {
  expectObject('densePagedStore', 'options', options);
  const { dtype, blockTokens = 64 } = options;
  expectThat('densePagedStore', 'dtype', dtype, dtype === undefined || floats.includes(dtype), floats.join(', '));
  if (!Number.isInteger(blockTokens) || blockTokens < 1) {
    throw new InvalidValueError(`blockTokens is ${show(blockTokens)}; it must be a positive whole number.`, {
      subject: 'blockTokens',
      given: blockTokens,
    });
  }
  return {
    name: dtype === undefined || dtype === 'f16' ? 'dense' : `dense ${dtype}`,
    create(given, capacity) {
      const layers = expectCapacity(given, capacity);
      const [first] = layers;
      if (first === undefined) return [];
      // Every sequence may leave one block of each head partly filled.
      const runs = Math.ceil(capacity.tokens / blockTokens) + capacity.slots;
      const heads = layers.reduce((sum, layer) => sum + layer.kvHeads, 0);
      const pool = new KvBlockPool({
        device: capacity.device,
        dtype: dtype ?? (capacity.rowDType === 'bf16' ? 'bf16' : 'f16'),
        headDim: first.headDim,
        blockTokens,
        blocks: runs * heads,
      });
      let open = layers.length;
      const closePool = () => {
        if (--open === 0) pool.dispose();
      };
      const poolBytes = (pool.keys.byteLength + pool.values.byteLength) / layers.length;
      const stores: DensePagedStore[] = [];
      try {
        for (const layer of layers) stores.push(new DensePagedStore(layer, { capacity, pool, poolBytes, closePool }));
      } catch (error) {
        for (const store of stores) store.dispose();
        pool.dispose();
        throw error;
      }
      return stores;
    },
  };
}

interface StoreParts {
  readonly capacity: KvCapacity;
  readonly pool: KvBlockPool;
  /** The layer's part of the pool. */
  readonly poolBytes: number;
  /** Called once, when the store is disposed. */
  readonly closePool: () => void;
}

class DensePagedStore implements KvStore {
  readonly name = 'dense';
  readonly layer: KvLayer;
  readonly #pool: KvBlockPool;
  readonly #poolBytes: number;
  readonly #closePool: () => void;
  readonly #tableWidth: number;
  readonly #blockTable: Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;
  readonly #keyCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  /** What the device holds, slot by slot: the blocks and the token count of each kv head. */
  readonly #blocks: number[][][];
  readonly #counts: number[][];

  constructor(layer: KvLayer, { capacity, pool, poolBytes, closePool }: StoreParts) {
    const { device, slots, tokensPerSlot } = capacity;
    this.layer = layer;
    this.#pool = pool;
    this.#poolBytes = poolBytes;
    this.#closePool = closePool;
    this.#tableWidth = Math.ceil(tokensPerSlot / pool.blockTokens);
    this.#blockTable = zeroTable(device, ['slot', 'kvHead', 'block'], [slots, layer.kvHeads, this.#tableWidth]);
    try {
      this.#keyCounts = zeroTable(device, ['slot', 'kvHead'], [slots, layer.kvHeads]);
    } catch (error) {
      this.#blockTable.dispose();
      throw error;
    }
    const perHead = <T>(value: () => T) => Array.from({ length: layer.kvHeads }, value);
    this.#blocks = Array.from({ length: slots }, () => perHead(() => [] as number[]));
    this.#counts = Array.from({ length: slots }, () => perHead(() => 0));
  }

  prepare(stream: Stream, batch: RowBatch): void {
    const missing: { slot: number; head: number; blocks: number }[] = [];
    for (const { slot, rows } of batch.entries) {
      this.lengths(slot).forEach((count, head) => {
        const blocks = this.#blocksFor(slot, count + rows) - this.#blocksOf(slot, head).length;
        if (blocks > 0) missing.push({ slot, head, blocks });
      });
    }
    if (missing.length === 0) return;
    const fresh = this.#pool.allocate(missing.reduce((sum, { blocks }) => sum + blocks, 0));
    for (const { slot, head, blocks } of missing) this.#blocksOf(slot, head).push(...fresh.splice(0, blocks));
    for (const slot of new Set(missing.map(({ slot }) => slot))) this.#writeTable(stream, slot);
  }

  append(stream: Stream, { batch, keys, values }: AppendCall): void {
    nativeOf('append', 'the store', this.#keyCounts, stream);
    expectPrepared(this, batch, (slot, kvHead) => this.#blocksOf(slot, kvHead).length * this.#pool.blockTokens);
    const { slots, queryStart } = batch;
    appendKv(stream, { keys, values, blocks: this.denseBlocks(), slots, queryStart });
  }

  advance(batch: RowBatch): void {
    for (const { slot, rows } of batch.entries) {
      this.#counts[slot] = this.lengths(slot).map((count) => count + rows);
    }
  }

  startDecode(stream: Stream, { batch, query, output, scale }: AttentionCall): FinishDecode {
    const { slots, queryStart } = batch;
    decodeAttention(stream, { query, output, blocks: this.denseBlocks(), slots, queryStart, scale });
    return () => undefined;
  }

  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    expectHeld(selection, this.lengths(slot));
    const { indices, counts } = selection;
    gatherKv(stream, { blocks: this.denseBlocks(), slot, indices, counts, outcomes });
    this.#shrink(slot, counts);
  }

  truncate(stream: Stream, slot: number, tokens: number): void {
    const counts = shorterBy(this.lengths(slot), tokens);
    stream.write(this.#keyCounts.slice('slot', slot, slot + 1), Int32Array.from(counts));
    this.#shrink(slot, counts);
  }

  copy(stream: Stream, fromSlot: number, toSlot: number): void {
    const counts = this.lengths(fromSlot);
    if (this.lengths(toSlot).some((count) => count > 0)) {
      throw new InvalidValueError(`Slot ${toSlot} holds tokens; copy into an empty one, or release it first.`, {
        subject: 'toSlot',
        given: toSlot,
      });
    }
    const needed = counts.map((count) => Math.ceil(count / this.#pool.blockTokens));
    const from = needed.flatMap((blocks, head) => this.#blocksOf(fromSlot, head).slice(0, blocks));
    const to = this.#pool.allocate(from.length);
    try {
      for (const pool of [this.#pool.keys, this.#pool.values]) copyBlocks(stream, { pool, from, to });
    } catch (error) {
      this.#pool.free(to);
      throw error;
    }
    this.#blocks[toSlot] = needed.map((blocks) => to.splice(0, blocks));
    this.#writeTable(stream, toSlot);
    const countsOf = (slot: number) => this.#keyCounts.slice('slot', slot, slot + 1);
    stream.copy(countsOf(fromSlot), countsOf(toSlot));
    this.#counts[toSlot] = [...counts];
  }

  release(stream: Stream, slot: number): void {
    this.#counts[slot] = this.lengths(slot).map(() => 0);
    stream.write(this.#keyCounts.slice('slot', slot, slot + 1), new Int32Array(this.layer.kvHeads));
    for (const blocks of this.#blocks[slot] ?? []) this.#pool.free(blocks.splice(0));
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

  denseBlocks(): PagedBlocks {
    const { keys, values } = this.#pool;
    return { keys, values, blockTable: this.#blockTable, keyCounts: this.#keyCounts };
  }

  bytes(): KvBytes {
    const blocks = this.#blocks.flat().reduce((sum, list) => sum + list.length, 0);
    return { device: blocks * this.#pool.blockBytes, host: 0 };
  }

  reserved(): KvBytes {
    return { device: this.#poolBytes + this.#blockTable.byteLength + this.#keyCounts.byteLength, host: 0 };
  }

  dispose(): void {
    if (this.#blockTable.disposed) return;
    for (const list of this.#blocks.flat()) this.#pool.free(list.splice(0));
    this.#blockTable.dispose();
    this.#keyCounts.dispose();
    this.#closePool();
  }

  #shrink(slot: number, counts: readonly number[]): void {
    this.#counts[slot] = [...counts];
    counts.forEach((count, head) => {
      const blocks = this.#blocksOf(slot, head);
      this.#pool.free(blocks.splice(Math.ceil(count / this.#pool.blockTokens)));
    });
  }

  #blocksFor(slot: number, tokens: number): number {
    const blocks = Math.ceil(tokens / this.#pool.blockTokens);
    if (blocks <= this.#tableWidth) return blocks;
    const limit = this.#tableWidth * this.#pool.blockTokens;
    throw new InvalidValueError(
      `Slot ${slot} would hold ${tokens} tokens; its sequence may have ${limit}. ` +
        'Open the model with a larger contextTokens.',
      { subject: 'tokens', given: tokens, wanted: limit },
    );
  }

  #blocksOf(slot: number, head: number): number[] {
    return this.#blocks[slot]?.[head] ?? [];
  }

  #writeTable(stream: Stream, slot: number): void {
    const table = new Int32Array(this.layer.kvHeads * this.#tableWidth);
    this.#blocks[slot]?.forEach((blocks, head) => table.set(blocks, head * this.#tableWidth));
    stream.write(this.#blockTable.slice('slot', slot, slot + 1), table);
  }
}
