import { type AttentionCall, type Device, mergeAttention, prefillAttention, type Stream } from '@kv/sparse-core';
import { type DensePagedStore, madeTogether } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import type { AttentionScratch } from './attention-scratch.js';
import type { BlockCodec } from './block-codec.js';
import { DensePieces, type SeenSlot } from './dense-pieces.js';
import { type PromptSegment, type PromptSlot, scoresSeen, seesAll, sees, segmentsOf } from './prompt-segments.js';
import { type ReadBlocks, rowTables } from './row-tables.js';
import type { SlotCodes } from './slot-codes.js';

export interface PromptParts {
  readonly dense: DensePagedStore;
  readonly codec: BlockCodec;
  readonly scratch: AttentionScratch;
  readonly sinkBlocks: number;
}

/** What it asks of the slots of its store. */
export interface PromptSlots {
  codes(slot: number): SlotCodes;
  promptSlot(slot: number): PromptSlot;
}

/** Attention of the rows of prompts over what they see of dense and of quantized blocks. */
export class PromptAttention {
  readonly #parts: PromptParts;
  readonly #slots: PromptSlots;
  readonly #pieces: DensePieces;

  constructor(parts: PromptParts, slots: PromptSlots) {
    this.#parts = parts;
    this.#slots = slots;
    this.#pieces = new DensePieces(parts.codec, parts.scratch);
  }

  /**
   * Enqueues it.
   * @returns the share of the causal scores
   * @throws OutOfMemoryError, CapabilityError, and what operations throw
   */
  attend(stream: Stream, { batch, query, output, scale }: AttentionCall): number {
    const { dense, scratch } = this.#parts;
    const segments = segmentsOf(batch.entries, (slot) => this.#slots.promptSlot(slot));
    const slots = batch.entries.map(({ slot }) => this.#seenOf(slot, segments));
    const isWhole = segments.length === batch.entries.length && segments.every(({ seen }) => seesAll(seen));
    const all = { query, scale, slots: batch.slots, queryStart: batch.queryStart, blocks: dense.denseBlocks(), causal: true };
    if (isWhole && slots.every(({ seen }) => seen.every(({ length }) => length === 0))) {
      prefillAttention(stream, { ...all, output });
      return 1;
    }
    const { logSumExp, second } = scratch.partsOf('attend', stream, output, dense.layer);
    using rows = rowsOf(stream.device, segments);
    const ofSegments = { query, scale, slots: rows.slots, queryStart: rows.queryStart };
    // What comes over the link comes while rows attend to what is dense.
    const pieces = this.#pieces.of(stream, slots, segments);
    if (isWhole) prefillAttention(stream, { ...all, output, logSumExp });
    else {
      using own = rowTables(stream.device, segments.map((segment) => this.#denseOf(segment)));
      const { keys, values } = dense.denseBlocks();
      const blocks = { keys, values, blockTable: own.blockTable, keyCounts: own.keyCounts };
      prefillAttention(stream, { ...ofSegments, output, logSumExp, blocks, causal: true });
    }
    for (const blocks of pieces) {
      prefillAttention(stream, { ...ofSegments, ...second, blocks, causal: false });
      mergeAttention(stream, { output, logSumExp, other: second });
    }
    return this.#density(batch.entries);
  }

  /** The quantized blocks of a slot that some of its segments see. */
  #seenOf(slot: number, segments: readonly PromptSegment[]): SeenSlot {
    const { sinkBlocks } = this.#parts;
    const codes = this.#slots.codes(slot);
    const own = segments.filter((segment) => segment.slot === slot).map((segment) => segment.seen);
    const firstEnd = Math.max(0, ...own.map((each) => each.firstEnd - sinkBlocks));
    const from = Math.max(firstEnd, Math.min(...own.map((each) => each.own - sinkBlocks)));
    const range = (start: number, end: number) => Array.from({ length: Math.max(0, end - start) }, (_, index) => start + index);
    const seen = codes.heads.map(({ length }) => [...range(0, Math.min(firstEnd, length)), ...range(from, length)]);
    return { slot, codes, seen, sinkBlocks };
  }

  /** What the kv heads of a segment see of dense blocks, its own rows last. */
  #denseOf({ slot, hidden, seen }: PromptSegment): ReadBlocks[] {
    const { dense, sinkBlocks } = this.#parts;
    const codes = this.#slots.codes(slot);
    const lengths = dense.lengths(slot);
    return dense.blockIds(slot).map((held, kvHead) => {
      const tokens = (lengths[kvHead] ?? 0) - hidden;
      const blocks = Math.ceil(tokens / blockTokens);
      const place = (block: number) => (block < sinkBlocks ? block : block + codes.count(kvHead));
      const ids = held.subarray(0, blocks).filter((_, block) => sees(seen, place(block)));
      return { ids, tokens: tokens - (blocks - ids.length) * blockTokens };
    });
  }

  #density(entries: AttentionCall['batch']['entries']): number {
    let [seen, all] = [0, 0];
    for (const { slot, rows } of entries) {
      const { lengths: [length = 0], blockTokens: size } = this.#slots.promptSlot(slot);
      const scores = scoresSeen(length, rows, size);
      seen += scores.seen;
      all += scores.all;
    }
    return seen / all;
  }
}

/** Which rows are whose, with a slot for each segment. */
function rowsOf(device: Device, segments: readonly PromptSegment[]) {
  const queryStart = new Int32Array(segments.length + 1);
  segments.forEach(({ rows }, index) => (queryStart[index + 1] = (queryStart[index] ?? 0) + rows));
  return madeTogether((own) => {
    const slots = own(device.tensor('i32', ['batch'], [segments.length], Int32Array.from(segments.keys())));
    const starts = own(device.tensor('i32', ['boundary'], [segments.length + 1], queryStart));
    const dispose = () => {
      slots.dispose();
      starts.dispose();
    };
    return { slots, queryStart: starts, [Symbol.dispose]: dispose };
  });
}
