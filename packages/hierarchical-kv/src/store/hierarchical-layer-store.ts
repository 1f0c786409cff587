import {
  appendKv,
  type AppendCall,
  type AttentionCall,
  decodeAttention,
  type FinishDecode,
  type KvBytes,
  type KvDemand,
  type KvLayer,
  type KvStore,
  OutOfMemoryError,
  type PagedBlocks,
  type RowBatch,
  type SelectionOutcomes,
  type Stream,
  type TokenSelection,
  transferBlocks,
} from '@kv/sparse-core';
import { answersApart, checkedCall, type DensePagedStore, entriesOf, expectPrepared, expectThat, joinedIds, type KvResidency, kvResidency, listOf, nativeOf } from '@kv/sparse-core/native';
import { blockMetadata } from '../operations/block-metadata.js';
import { blockScores } from '../operations/block-scores.js';
import { fetchBlocks } from '../operations/fetch-blocks.js';
import { forgetBlocks } from '../operations/forget-blocks.js';
import { planBlocks } from '../operations/plan-blocks.js';
import { selectTopBlocks } from '../operations/select-top-blocks.js';
import { methodOf } from '../block-metadata-method.js';
import { blockTokens, cachedBlocksRead, fixedPlace, type LayerSizes } from './block-sizes.js';
import type { DeviceBlocks } from './device-blocks.js';
import type { BlocksToMake, MadeMetadata } from './made-metadata.js';
import type { NewestDemand } from './newest-demand.js';
import type { HostPrompt, PromptBlocks } from './prompt-blocks.js';
import type { StepScratch } from './step-scratch.js';

export interface StoreParts {
  readonly name: string;
  readonly sizes: LayerSizes;
  /** The layer's place among all. */
  readonly index: number;
  /** All keys and values, in host memory. Its tables are on the device. */
  readonly host: DensePagedStore;
  readonly device: DeviceBlocks;
  readonly demand: NewestDemand;
  readonly scratch: StepScratch;
  readonly prompts: PromptBlocks;
  /** Where blocks are described in a way of the user's own. */
  readonly made: MadeMetadata | undefined;
  /** The layer's part of what all layers share, and of host memory. */
  readonly shared: KvBytes;
  /** The store of the next layer. */
  readonly next: () => HierarchicalLayerStore | undefined;
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** Keys and values of one layer: all of them in host memory, those that answers read on the device. */
export class HierarchicalLayerStore implements KvStore {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #parts: StoreParts;
  readonly #host: DensePagedStore;
  /** Slots whose first and last blocks on the device are those of the host. */
  readonly #current = new Set<number>();
  /** Slots of which tokens are being selected. */
  readonly #selecting = new Set<number>();
  /** Blocks that answers of each slot read of a kv head. */
  readonly #budgets: Int32Array;
  /** The most that one answer reads of the cache. */
  readonly #mostRead: number;
  #stream: Stream | undefined;
  /** The rows that came last, for their attention. */
  #newest: AppendCall | undefined;
  /** Whether the host has them. */
  #saved = true;
  #disposed = false;

  constructor(parts: StoreParts) {
    this.name = parts.name;
    this.layer = parts.sizes.layer;
    this.#parts = parts;
    this.#host = parts.host;
    this.#budgets = new Int32Array(parts.sizes.capacity.slots).fill(parts.sizes.budgetBlocks);
    this.#mostRead = this.layer.kvHeads * cachedBlocksRead(parts.sizes, parts.sizes.capacity.tokensPerSlot);
  }

  /** Has `answersApart` and `kvResidency`. */
  capability(name: string): object | undefined {
    return name === kvResidency.name ? this.#residency : name === answersApart.name ? this : undefined;
  }

  get #residency(): KvResidency {
    const { budgetBlocks, sinkBlocks, recentBlocks } = this.#parts.sizes;
    const [budgetTokens, sinkTokens, localWindow] = [budgetBlocks, sinkBlocks, recentBlocks - 1].map((blocks) => blocks * blockTokens) as [number, number, number];
    return { blockTokens, deviceBlocks: this.#parts.device.cached, budgetTokens, sinkTokens, localWindow };
  }

  /** @throws OutOfMemoryError also when the cache has not all blocks that a step's answers read; nothing is changed then */
  prepare(stream: Stream, batch: RowBatch): void {
    const entries = entriesOf('prepare', batch);
    this.#expectCached(entries);
    this.#join('prepare', stream);
    this.#host.prepare(stream, batch);
    this.#serve(stream);
    this.#parts.demand.ask(stream);
    // Rows of prompts alone do not pass through the fixed places by the counts that these have.
    const hasAnswers = entries.some(({ rows }) => rows === 1);
    for (const { slot, rows } of entries) {
      if (this.#selecting.size > 0) this.#selecting.delete(slot);
      if (hasAnswers && !this.#current.has(slot)) this.#refresh(stream, slot, rows === 1);
      // What a recorded step filled is described in front of the next one.
      this.#makeOfHost(stream, slot, (tokens) => Math.ceil(tokens / blockTokens) - (tokens % blockTokens === 0 ? 1 : 0));
    }
  }

  /**
   * Rows of one prompt alone are written to where they are attended to, and go to the host then. Of several prompts they are
   * written to places of their slots that are refreshed before its first answer.
   */
  append(stream: Stream, call: AppendCall): void {
    const { keys, values, batch, rope } = checkedCall('append', call);
    const { device, scratch, prompts } = this.#parts;
    const { slots, queryStart, entries } = batch;
    const { keyCounts } = this.#host.denseBlocks();
    const fixed = { keys: device.pool.keys, values: device.pool.values, blockTable: scratch.fixedTable };
    // A recorded step has no entries.
    this.#saved = entries.length === 0 || entries.some(({ rows }) => rows === 1);
    if (!this.#saved) expectPrepared(this.#host, batch, (slot, kvHead) => this.#host.roomOf(slot, kvHead));
    const [only] = entries;
    if (this.#saved) {
      this.#host.append(stream, call);
      appendKv(stream, { keys, values, blocks: { ...fixed, keyCounts: device.fixedCounts }, slots, queryStart });
    } else if (only && entries.length === 1) {
      const { slot } = only;
      prompts.append(stream, this.onHost(slot, 0), { keys, values, keyCounts: keyCounts.slice('slot', slot, slot + 1), queryStart, rope });
    } else {
      appendKv(stream, { keys, values, blocks: { ...fixed, keyCounts }, slots, queryStart, rope });
    }
    this.#newest = call;
    for (const { slot, rows } of entries) if (rows > 1) this.#current.delete(slot);
  }

  advance(batch: RowBatch): void {
    this.#host.advance(batch);
  }

  /** @throws InvalidValueError for rows that are not those of the last `append` */
  attend(stream: Stream, given: AttentionCall): void {
    const { batch, query, output, scale } = checkedCall('attend', given);
    const { device, prompts } = this.#parts;
    const { blockTable, keyCounts } = this.#host.denseBlocks();
    const following = this.#parts.next();
    let first = 0;
    for (const { slot, rows } of batch.entries) {
      const newest = this.#newestRows(slot, rows);
      using start = batch.entries.length > 1 ? stream.device.tensor('i32', ['boundary'], [2], Int32Array.of(0, rows)) : undefined;
      prompts.attend(stream, {
        ...newest,
        query: query.slice('token', first, first + rows),
        output: output.slice('token', first, first + rows),
        scale,
        earlier: this.onHost(slot, rows),
        next: following && (() => following.onHost(slot, 0)),
        saved: this.#saved,
        keyCounts: keyCounts.slice('slot', slot, slot + 1),
        queryStart: start ?? batch.queryStart,
        device,
        hostTable: blockTable.slice('slot', slot, slot + 1),
        make: (blocks) => this.#make(stream, blocks),
      });
      first += rows;
    }
  }

  /** What the host has of a slot, but for its newest rows. */
  onHost(slot: number, rows: number): HostPrompt {
    const tokens = this.lengths(slot).map((held) => held - rows);
    return { layer: this.layer.index, slot, tokens, host: this.#host.denseBlocks(), hostBlocks: this.#host.blockIds(slot) };
  }

  startDecode(stream: Stream, call: AttentionCall): FinishDecode {
    const { batch, query, output, scale } = checkedCall('startDecode', call);
    const { sizes, device, scratch } = this.#parts;
    const { sinkBlocks, recentBlocks, capacity } = sizes;
    expectThat('startDecode', 'rows', batch.rows, batch.rows <= capacity.slots, `at most ${capacity.slots}, one for each sequence`);
    const { slots, queryStart, rows } = batch;
    const { keys: hostKeys, values: hostValues, blockTable, keyCounts } = this.#host.denseBlocks();
    const { keys, values } = device.pool;
    const { metadata, checksums, cache } = device;
    const { chosen, planned, fixedTable } = scratch;
    const scores = scratch.scores.slice('token', 0, rows);
    const rowsOf = { slots, queryStart, keyCounts };
    const fixed = { blockTokens, sinkBlocks, recentBlocks };
    const checked = checksums && { checksums, values };
    blockMetadata(stream, { ...rowsOf, ...checked, keys, blockTable: fixedTable, metadata, metadataTable: blockTable, rows, method: methodOf(sizes.metadata) });
    blockScores(stream, { ...rowsOf, query, scores, metadata, blockTable, blockTokens });
    selectTopBlocks(stream, { ...rowsOf, ...fixed, ...chosen, scores, budgets: device.budgets });
    this.#join('startDecode', stream);
    planBlocks(stream, { ...rowsOf, ...fixed, ...chosen, ...cache, ...planned, blockTable, rows });
    fetchBlocks(stream, { hostKeys, hostValues, keys, values, ...planned, checksums });
    const blocks = { keys, values, blockTable: scratch.attended, keyCounts: planned.readCounts };
    decodeAttention(stream, { query, output, blocks, slots, queryStart, scale, apart: capacity.answersApart });
    return () => undefined;
  }

  /** Selecting reads the keys where they are, on the host. */
  makeDense(stream: Stream, slot: number): Promise<() => void> {
    this.#join('makeDense', stream);
    return Promise.resolve(() => void this.#selecting.add(slot));
  }

  /** Tokens move within host memory. What was read of them on the device, and what their blocks are scored by, is made anew. */
  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    const former = this.#host.blockIds(slot).map((held) => held.slice());
    this.#settle('keep', stream, slot);
    this.#host.keep(stream, slot, selection, outcomes);
    this.#selecting.delete(slot);
    this.#current.delete(slot);
    this.#parts.device.forget(stream, joinedIds(...former));
    this.#describe(stream, slot);
  }

  truncate(stream: Stream, slot: number, tokens: number): void {
    const former = this.#host.blockIds(slot).map((held) => held.slice());
    this.#settle('truncate', stream, slot);
    this.#host.truncate(stream, slot, tokens);
    if (tokens === 0) return;
    const changed = former.map((held, kvHead) => held.subarray(Math.floor((this.lengths(slot)[kvHead] ?? 0) / blockTokens)));
    this.#parts.device.forget(stream, joinedIds(...changed));
    this.#current.delete(slot);
  }

  copy(stream: Stream, fromSlot: number, toSlot: number, dropped = 0): void {
    this.#settle('copy', stream, toSlot);
    this.#host.copy(stream, fromSlot, toSlot, dropped);
    this.#current.delete(toSlot);
  }

  /** @throws InvalidValueError for less than what is always read, and for more than the store's own */
  setBudget(stream: Stream, slot: number, budgetTokens: number | undefined): void {
    this.lengths(slot);
    const { sinkBlocks, recentBlocks, budgetBlocks } = this.#parts.sizes;
    const [least, most] = [sinkBlocks + recentBlocks, budgetBlocks];
    const blocks = budgetTokens === undefined ? most : Math.ceil(budgetTokens / blockTokens);
    const isRight = Number.isSafeInteger(budgetTokens ?? 0) && blocks >= least && blocks <= most;
    expectThat('setBudget', 'budgetTokens', budgetTokens, isRight, `a whole number from ${(least - 1) * blockTokens + 1} to ${most * blockTokens}`);
    this.#budgets[slot] = blocks;
    stream.write(this.#parts.device.budgets.slice('slot', slot, slot + 1), Int32Array.of(blocks));
  }

  /** Counts of the blocks that pass through the cache, summed over kv heads; the working set is that of 12 steps. */
  demand(slot: number): KvDemand | undefined {
    this.#host.length(slot, 0);
    return this.#parts.demand.of(this.#parts.index, slot);
  }

  /** Its blocks leave the cache, those that other sequences share too. The first and the last stay: their places are the slot's. */
  evict(stream: Stream, slot: number): void {
    this.lengths(slot);
    this.#join('evict', stream);
    const { blockTable, keyCounts } = this.#host.denseBlocks();
    const own = { blockTable: blockTable.slice('slot', slot, slot + 1), keyCounts: keyCounts.slice('slot', slot, slot + 1) };
    forgetBlocks(stream, { ...own, where: this.#parts.device.cache.where, blockTokens });
  }

  release(stream: Stream, slot: number): void {
    const { device, demand, index } = this.#parts;
    const former = joinedIds(...this.#host.blockIds(slot));
    this.#settle('release', stream, slot);
    this.#host.release(stream, slot);
    device.forget(stream, this.#host.ids.unheld(former));
    device.resetDemand(stream, slot);
    demand.reset(index, slot);
    this.setBudget(stream, slot, undefined);
    this.#current.delete(slot);
    this.#selecting.delete(slot);
  }

  lengths(slot: number): readonly number[] {
    return this.#host.lengths(slot);
  }

  /** Those of the host, of slots of which tokens are being selected. */
  denseBlocks(slots?: readonly number[]): PagedBlocks | undefined {
    const blocks = this.#host.denseBlocks(slots);
    return slots?.every((slot) => this.#selecting.has(slot)) === true ? blocks : undefined;
  }

  /** Of the device: metadata of the blocks, the places of slots that hold any, and as much of the cache as they may take. */
  bytes(given?: readonly number[]): KvBytes {
    const { device, sizes } = this.#parts;
    const { slots: count } = sizes.capacity;
    const slots = given === undefined ? Array.from({ length: count }, (_, slot) => slot) : listOf('bytes', 'slots', given, count);
    const { blockBytes } = device.pool;
    const host = this.#host.bytes(slots).device;
    const blocks = host / blockBytes;
    const used = slots.filter((slot) => this.lengths(slot).some((held) => held > 0)).length;
    const places = used * this.layer.kvHeads * (sizes.sinkBlocks + sizes.recentBlocks) + Math.min(blocks, device.cached);
    return { device: blocks * device.metadataBytes + places * blockBytes, host };
  }

  reserved(): KvBytes {
    const { device, shared } = this.#parts;
    return { device: device.byteLength + shared.device, host: shared.host };
  }

  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#newest = undefined;
    this.#host.dispose();
    this.#parts.device[Symbol.dispose]();
    this.#parts.close();
  }

  /** @throws OutOfMemoryError unless the cache has room for what these slots read in a step, with one token more */
  #expectCached(entries: RowBatch['entries']): void {
    const { sizes, device } = this.#parts;
    // Mostly there is room for all that they can come to read. Every layer comes here in every step.
    if (entries.length * this.#mostRead <= device.cached) return;
    const { kvHeads } = this.layer;
    let [answers, needed] = [0, 0];
    for (const { slot, rows } of entries) {
      if (rows > 1) continue;
      answers += 1;
      for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
        needed += cachedBlocksRead(sizes, this.#host.length(slot, kvHead) + 1, this.#budgets[slot]);
      }
    }
    if (needed <= device.cached) return;
    throw new OutOfMemoryError(
      `${this.name}: the answers of ${answers} sequences read ${needed} blocks of a layer's cache, which has ${device.cached}. ` +
        'Give it more deviceBytes or a smaller budgetTokens, or fewer sequences a step.',
      { subject: 'deviceBytes', given: needed, wanted: device.cached },
    );
  }

  /** Of a stream that failed, work was skipped: where another takes its place, the device may hold other blocks than it says. */
  #serve(stream: Stream): void {
    if (this.#stream !== undefined && this.#stream !== stream) {
      this.#parts.device.reset(stream);
      this.#parts.prompts.forget();
      stream.write(this.#parts.device.budgets, this.#budgets);
      this.#current.clear();
    }
    this.#stream = stream;
  }

  /** Says on the device how many tokens a slot has, and loads its first and last blocks. */
  #refresh(stream: Stream, slot: number, loads: boolean): void {
    const { device, sizes } = this.#parts;
    const lengths = this.lengths(slot);
    stream.write(device.fixedCounts.slice('slot', slot, slot + 1), Int32Array.from(lengths));
    if (!loads) return;
    this.#current.add(slot);
    const { sinkBlocks, recentBlocks } = sizes;
    const moves = this.#host.blockIds(slot).flatMap((held, kvHead) => {
      const blocks = Math.ceil((lengths[kvHead] ?? 0) / blockTokens);
      const first = (slot * this.layer.kvHeads + kvHead) * (sinkBlocks + recentBlocks);
      return Array.from(held.subarray(0, blocks), (from, block) => ({ from, block, to: first + fixedPlace(sizes, block) })).filter(
        ({ block }) => block < sinkBlocks || block >= blocks - recentBlocks,
      );
    });
    if (moves.length === 0) return;
    const numbers = { from: moves.map(({ from }) => from), to: moves.map(({ to }) => to) };
    const { keys, values } = this.#host.denseBlocks();
    transferBlocks(stream, { source: keys, destination: device.pool.keys, ...numbers });
    transferBlocks(stream, { source: values, destination: device.pool.values, ...numbers });
  }

  /** Makes what the blocks of a slot are scored by. */
  #describe(stream: Stream, slot: number): void {
    const { device, sizes } = this.#parts;
    const { keys, values, blockTable, keyCounts } = this.#host.denseBlocks();
    const rows = Math.max(...this.lengths(slot));
    using slots = stream.device.tensor('i32', ['batch'], [1], Int32Array.of(slot));
    using queryStart = stream.device.tensor('i32', ['boundary'], [2], Int32Array.of(0, rows));
    const checked = device.checksums && { checksums: device.checksums, values };
    const of = { slots, queryStart, keyCounts, rows, ...checked };
    blockMetadata(stream, { ...of, keys, blockTable, metadata: device.metadata, metadataTable: blockTable, method: methodOf(sizes.metadata) });
    this.#makeOfHost(stream, slot, () => 0);
  }

  #make(stream: Stream, blocks: BlocksToMake): void {
    this.#parts.made?.write(stream, { layer: this.layer, metadata: this.#parts.device.metadata }, blocks);
  }

  /** The same of full blocks of a slot, in host memory. @param first the first one, of a head of so many tokens */
  #makeOfHost(stream: Stream, slot: number, first: (tokens: number) => number): void {
    if (this.#parts.made === undefined) return;
    const lengths = this.lengths(slot);
    const ids = this.#host.blockIds(slot).flatMap((held, kvHead) => {
      const tokens = lengths[kvHead] ?? 0;
      return Array.from(held.subarray(Math.max(0, first(tokens)), Math.floor(tokens / blockTokens)));
    });
    this.#make(stream, { keys: this.#host.denseBlocks().keys, from: ids, to: ids });
  }

  /** What goes on beside the stream is done, and what was read of a slot's prompt is no longer so. */
  #settle(operation: string, stream: Stream, slot: number): void {
    this.#join(operation, stream);
    this.#parts.prompts.forget(slot);
  }

  /** @throws DeviceError, DisposedError, InvalidValueError unless work of the store can be enqueued there */
  #join(operation: string, stream: Stream): void {
    const { prompts, device } = this.#parts;
    if (!prompts.isAhead) return;
    nativeOf(operation, 'the store', device.fixedCounts, stream);
    // Replays of a recorded step come behind `prepare`.
    if (!stream.recording) prompts.join(stream);
  }

  /** Keys and values of the rows of a slot, of the last `append`. */
  #newestRows(slot: number, rows: number): Pick<AppendCall, 'keys' | 'values'> {
    let first = 0;
    for (const entry of this.#newest?.batch.entries ?? []) {
      if (entry.slot === slot && entry.rows === rows && this.#newest) {
        const { keys, values } = this.#newest;
        return { keys: keys.slice('token', first, first + rows), values: values.slice('token', first, first + rows) };
      }
      first += entry.rows;
    }
    expectThat('attend', 'batch', { slot, rows }, false, 'rows of the last append');
    throw new Error('unreachable');
  }
}
