import {
  type AppendCall,
  type AttentionCall,
  CapabilityError,
  decodeAttention,
  type FinishDecode,
  type KvBytes,
  type KvCapacity,
  type KvLayer,
  type KvStore,
  mergeAttention,
  type PagedBlocks,
  prefillAttention,
  type RowBatch,
  type SelectionOutcomes,
  type Stream,
  type TokenSelection,
} from '@kv/sparse-core';
import { checkedCall, countDistinct, type DensePagedStore, entriesOf, expectThat, shorterBy, SlotTable } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { type QuantizedPrompts, quantizedPrompts } from '../quantized-prompts.js';
import type { AttentionScratch } from './attention-scratch.js';
import type { BlockCodec, DenseBlocks, NewBlock } from './block-codec.js';
import { DensePieces } from './dense-pieces.js';
import { SlotCodes } from './slot-codes.js';

export interface StoreParts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  /** Holds what is not quantized: the first tokens, and those behind the quantized ones. */
  readonly dense: DensePagedStore;
  /** Holds the others. */
  readonly codec: BlockCodec;
  readonly scratch: AttentionScratch;
  /** The layer's part of what all layers share. */
  readonly shared: KvBytes;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
  /** Whether prompts are quantized while they are read, not when they are complete. */
  readonly quantizesPrompts: boolean;
  /** Called once, when the store is disposed. */
  readonly close: () => void;
}

/** Keys and values of one layer: full blocks that left the local window as codes, the others in a dense paged store. */
export class QuantizedStore implements KvStore, QuantizedPrompts {
  readonly name: string;
  readonly layer: KvLayer;
  readonly #parts: StoreParts;
  readonly #dense: DensePagedStore;
  /** Of the quantized tokens alone. */
  readonly #slots: SlotTable<SlotCodes, 'blocks'>;
  readonly #pieces: DensePieces;

  /** @throws OutOfMemoryError */
  constructor(parts: StoreParts) {
    const { name, layer, capacity, dense, codec, scratch } = parts;
    this.name = name;
    this.layer = layer;
    this.#parts = parts;
    this.#dense = dense;
    const empty = (mostBlocks: number) => new SlotCodes(layer.kvHeads, mostBlocks);
    this.#slots = new SlotTable({ layer, capacity, blockTokens, tables: ['blocks'], empty });
    try {
      this.#pieces = new DensePieces(layer, capacity, codec, scratch);
    } catch (error) {
      this.#slots.dispose();
      throw error;
    }
  }

  /** Blocks that have left the local window since are quantized first, which makes room. */
  prepare(stream: Stream, batch: RowBatch): void {
    this.#slots.expectUsable('prepare', stream);
    const entries = entriesOf('prepare', batch);
    for (const { slot, rows } of entries) for (const held of this.lengths(slot)) this.#slots.blocksFor(slot, held + rows);
    this.#quantize(stream, entries.map(({ slot }) => slot));
    // The step may end in quantizing, which nothing may keep from having room.
    const needed = entries.map(({ slot, rows }) => ({ slot, blocks: sum(this.#leaving(slot, rows)) }));
    const { ids } = this.#parts.codec;
    ids.expectUnpromised(sum(needed.map(({ slot, blocks }) => blocks - this.#slots.blocks(slot).promised)));
    this.#dense.prepare(stream, batch);
    for (const { slot, blocks } of needed) this.#promise(slot, blocks);
  }

  append(stream: Stream, call: AppendCall): void {
    this.#dense.append(stream, call);
  }

  advance(batch: RowBatch): void {
    this.#dense.advance(batch);
  }

  /** Attention of the rows of prompts over all that their slots hold, which is quantized behind it. */
  attend(stream: Stream, call: AttentionCall): void {
    this.#slots.expectUsable('attend', stream);
    const { batch, query, output, scale } = checkedCall('attend', call);
    const { slots, queryStart } = batch;
    const rows = { query, slots, queryStart, scale };
    const ofBatch = batch.entries.map(({ slot }) => slot);
    const dense = { ...rows, output, blocks: this.#dense.denseBlocks(), causal: true };
    if (this.denseBlocks(ofBatch) !== undefined) prefillAttention(stream, dense);
    else {
      const { logSumExp, second } = this.#parts.scratch.partsOf('attend', stream, output, this.layer);
      prefillAttention(stream, { ...dense, logSumExp });
      const codes = ofBatch.map((slot) => ({ slot, blocks: this.#slots.blocks(slot) }));
      for (const blocks of this.#pieces.of(stream, codes)) {
        prefillAttention(stream, { ...rows, ...second, blocks, causal: false });
        mergeAttention(stream, { output, logSumExp, other: second });
      }
    }
    this.#quantize(stream, ofBatch);
  }

  capability(name: string): QuantizedPrompts | undefined {
    return name === quantizedPrompts.name ? this : undefined;
  }

  startDecode(stream: Stream, call: AttentionCall): FinishDecode {
    const { batch, query, output, scale } = checkedCall('startDecode', call);
    const { slots, queryStart } = batch;
    const rows = { query, slots, queryStart, scale };
    const { codec, scratch } = this.#parts;
    const { logSumExp, second } = scratch.partsOf('startDecode', stream, output, this.layer);
    expectThat('startDecode', 'rows', batch.rows, batch.rows <= codec.mostRows, `at most ${codec.mostRows}, one for each sequence`);
    decodeAttention(stream, { ...rows, output, logSumExp, blocks: this.#dense.denseBlocks() });
    const { keyCounts, tables } = this.#slots;
    codec.attend(stream, { ...rows, blockTable: tables.blocks, keyCounts }, { output, logSumExp }, second);
    return () => undefined;
  }

  /** @throws CapabilityError when tokens of the slot are quantized: they can be dropped before, not after */
  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void {
    this.#slots.expectUsable('keep', stream);
    if (this.denseBlocks([slot]) === undefined) {
      throw new CapabilityError(
        `${this.name}: cannot keep a selection of slot ${slot}, tokens of which are quantized already. Use dense prefill ` +
          'attention with this store: it then quantizes when the prompt is complete and the selection made.',
        { subject: 'keep', given: 'quantized blocks', wanted: 'dense blocks' },
      );
    }
    this.#dense.keep(stream, slot, selection, outcomes);
    this.#promise(slot, sum(this.#leaving(slot)));
  }

  /** A quantized block that loses some of its tokens becomes dense again: what its codes say, no more. */
  truncate(stream: Stream, slot: number, tokens: number): void {
    this.#slots.expectUsable('truncate', stream);
    const counts = shorterBy('truncate', this.lengths(slot), tokens);
    const { codec, sinkBlocks } = this.#parts;
    const codes = this.#slots.blocks(slot);
    const kept = counts.map((count, kvHead) => {
      const blocks = Math.max(0, Math.floor(count / blockTokens) - sinkBlocks);
      return Math.min(codes.count(kvHead), blocks);
    });
    const left = counts.map((count, kvHead) => count - (kept[kvHead] ?? 0) * blockTokens);
    const opened = counts.map((_, kvHead) =>
      (left[kvHead] ?? 0) > sinkBlocks * blockTokens ? codes.of(kvHead).at(kept[kvHead] ?? 0) : undefined,
    );
    // What is dense behind the block in which a kv head is cut goes first: others may hold it too.
    if (opened.some((id) => id !== undefined)) {
      const cut = (count: number, kvHead: number) => (opened[kvHead] === undefined ? count : sinkBlocks * blockTokens);
      this.#dense.resize(stream, slot, left.map(cut));
    }
    this.#dense.resize(stream, slot, left);
    const dense = this.#dense.blockIds(slot);
    const moves = opened.flatMap((from, kvHead) => {
      const to = dense[kvHead]?.[sinkBlocks];
      return from === undefined || to === undefined ? [] : [{ kvHead, from, to }];
    });
    if (moves.length > 0) codec.decode(stream, this.#densePools(), moves);
    kept.forEach((blocks, kvHead) => codec.ids.free(codes.cut(kvHead, blocks)));
    this.#writeCounts(stream, slot);
    this.#promise(slot, sum(this.#leaving(slot)));
  }

  finishPrefill(stream: Stream, slot: number): void {
    this.#slots.expectUsable('finishPrefill', stream);
    this.#slots.blocks(slot).finished = true;
    this.#quantize(stream, [slot]);
  }

  copy(stream: Stream, fromSlot: number, toSlot: number, dropped = 0): void {
    this.#slots.expectUsable('copy', stream);
    shorterBy('copy', this.lengths(fromSlot), dropped);
    this.#slots.expectEmpty(toSlot);
    const { ids } = this.#parts.codec;
    const needed = sum(this.#leaving(fromSlot));
    ids.expectUnpromised(needed);
    this.#dense.copy(stream, fromSlot, toSlot);
    const [source, codes] = [this.#slots.blocks(fromSlot), this.#slots.blocks(toSlot)];
    codes.copy(source, source.heads.map(({ length }) => length));
    codes.finished = source.finished;
    for (const held of codes.heads) ids.share(held);
    this.#promise(toSlot, needed);
    this.#writeCodes(stream, toSlot);
    if (dropped === 0) return;
    try {
      this.truncate(stream, toSlot, dropped);
    } catch (error) {
      this.release(stream, toSlot);
      throw error;
    }
  }

  release(stream: Stream, slot: number): void {
    this.#slots.expectUsable('release', stream);
    this.#dense.release(stream, slot);
    const codes = this.#slots.blocks(slot);
    codes.finished = false;
    codes.heads.forEach((_, kvHead) => this.#parts.codec.ids.free(codes.cut(kvHead, 0)));
    this.#writeCounts(stream, slot);
    this.#promise(slot, 0);
  }

  lengths(slot: number): readonly number[] {
    const quantized = this.#slots.lengths(slot);
    return this.#dense.lengths(slot).map((held, kvHead) => held + (quantized[kvHead] ?? 0));
  }

  denseBlocks(slots?: readonly number[]): PagedBlocks | undefined {
    const held = this.#slots.allBlocks(slots).flatMap(({ heads }) => heads);
    return held.some(({ length }) => length > 0) ? undefined : this.#dense.denseBlocks(slots);
  }

  bytes(slots?: readonly number[]): KvBytes {
    const blocks = countDistinct(this.#slots.allBlocks(slots).flatMap(({ heads }) => heads));
    const { device, host } = this.#dense.bytes(slots);
    const { blockBytes } = this.#parts.codec;
    return { device: device + blocks * blockBytes.device, host: host + blocks * blockBytes.host };
  }

  reserved(): KvBytes {
    const { device, host } = this.#dense.reserved();
    const { shared } = this.#parts;
    const tables = this.#slots.byteLength + this.#pieces.byteLength;
    return { device: device + shared.device + tables, host: host + shared.host };
  }

  dispose(): void {
    if (this.#slots.disposed) return;
    for (const codes of this.#slots.allBlocks()) {
      for (const held of codes.heads) this.#parts.codec.ids.free(held);
    }
    this.#slots.dispose();
    this.#pieces.dispose();
    this.#dense.dispose();
    this.#parts.close();
  }

  /** How many full blocks of each kv head are behind the sinks and before the window, once so many rows have come. */
  #leaving(slot: number, rows = 0): number[] {
    const { sinkBlocks, localWindow } = this.#parts;
    const blocks = (held: number) => Math.floor((held + rows - localWindow) / blockTokens) - sinkBlocks;
    return this.#dense.lengths(slot).map((held) => Math.max(0, blocks(held)));
  }

  /** Says how many blocks the dense tokens of a slot may come to need. */
  #promise(slot: number, blocks: number): void {
    const codes = this.#slots.blocks(slot);
    this.#parts.codec.ids.promised += blocks - codes.promised;
    codes.promised = blocks;
  }

  /** Quantizes what has left the local window of slots, and returns its dense blocks. They were promised as many. */
  #quantize(stream: Stream, slots: readonly number[]): void {
    const { codec, sinkBlocks, quantizesPrompts } = this.#parts;
    const leaving = slots
      .filter((slot) => quantizesPrompts || this.#slots.blocks(slot).finished)
      .map((slot) => ({ slot, counts: this.#leaving(slot) }))
      .filter(({ counts }) => sum(counts) > 0);
    if (leaving.length === 0) return;
    const read = leaving.flatMap(({ slot, counts }) =>
      this.#dense.blockIds(slot).flatMap((held, kvHead) => {
        const codes = this.#slots.blocks(slot).of(kvHead);
        return Array.from(held.subarray(sinkBlocks, sinkBlocks + (counts[kvHead] ?? 0)), (from, nth) => ({ kvHead, from, nth, codes }));
      }),
    );
    let fresh = codec.ids.allocate(read.length);
    const blocks = read.map(({ kvHead, from, nth, codes }, index): NewBlock => {
      const before = nth === 0 ? codes.at(-1) : fresh[index - 1];
      return { kvHead, from, to: fresh[index] ?? NaN, place: codes.length + nth, before };
    });
    try {
      codec.encode(stream, this.#densePools(), blocks);
    } catch (error) {
      codec.ids.free(fresh);
      throw error;
    }
    for (const { slot, counts } of leaving) {
      const codes = this.#slots.blocks(slot);
      counts.forEach((count, kvHead) => {
        codes.push(kvHead, fresh.subarray(0, count));
        fresh = fresh.subarray(count);
      });
      this.#dense.removeBlocks(stream, slot, sinkBlocks, counts);
      this.#promise(slot, codes.promised - sum(counts));
      this.#writeCodes(stream, slot);
    }
  }

  #densePools(): DenseBlocks {
    const { keys, values } = this.#dense.denseBlocks();
    return { keys, values };
  }

  /** Says on the device which quantized blocks a slot has. */
  #writeCodes(stream: Stream, slot: number): void {
    const codes = this.#slots.blocks(slot);
    stream.write(this.#slots.tables.blocks.slice('slot', slot, slot + 1), codes.table);
    this.#writeCounts(stream, slot);
  }

  /** Says there how many of those in the table it has. */
  #writeCounts(stream: Stream, slot: number): void {
    const codes = this.#slots.blocks(slot);
    this.#slots.write(stream, slot, codes.heads.map(({ length }) => length * blockTokens));
    this.#parts.codec.write(stream, slot, codes);
  }
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((total, number) => total + number, 0);
}
