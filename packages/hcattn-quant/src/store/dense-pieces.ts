import type { PagedBlocks, Stream } from '@kv/sparse-core';
import type { AttentionScratch } from './attention-scratch.js';
import type { BlockCodec, StagedMove } from './block-codec.js';
import { type PromptSegment, sees } from './prompt-segments.js';
import { type ReadBlocks, rowTables } from './row-tables.js';
import { notStaged, type SlotCodes } from './slot-codes.js';

/** A slot of a batch, its quantized blocks, and those of them that its rows see. */
export interface SeenSlot {
  readonly slot: number;
  readonly codes: SlotCodes;
  /** Of each kv head: places among its quantized blocks, ascending. */
  readonly seen: readonly (readonly number[])[];
  /** Blocks before the quantized ones. */
  readonly sinkBlocks: number;
}

/** The part of the quantized blocks that fits the scratch at once. */
interface Piece {
  /** Of each slot, each kv head: places among its quantized blocks. */
  readonly places: readonly (readonly (readonly number[])[])[];
  /** The block of the scratch that holds the first of a slot's kv head. */
  readonly firstBlock: (slot: number, kvHead: number) => number;
  /** Blocks whose codes are decoded. */
  readonly decoded: readonly StagedMove[];
}

/**
 * Makes quantized blocks of slots dense, a piece of each sequence at a time: staged ones come over the link while the piece
 * before is attended to.
 */
export class DensePieces {
  readonly #scratch: AttentionScratch;
  readonly #codec: BlockCodec;

  constructor(codec: BlockCodec, scratch: AttentionScratch) {
    this.#codec = codec;
    this.#scratch = scratch;
  }

  /**
   * Begins with the first piece, and enqueues the rest as it is asked for: each piece is valid until the next is.
   * @returns what each of the segments sees of a piece, a slot for each
   */
  of(stream: Stream, slots: readonly SeenSlot[], segments: readonly PromptSegment[]): Iterable<PagedBlocks> {
    return this.#all(stream, slots, segments, this.#begin(stream, slots, 0));
  }

  *#all(stream: Stream, slots: readonly SeenSlot[], segments: readonly PromptSegment[], first: Piece | undefined) {
    const { keys, values } = this.#scratch.pool;
    for (let [index, next] = [1, first]; next !== undefined; index += 1) {
      const piece = next;
      this.#codec.staged?.link.join(stream);
      next = this.#begin(stream, slots, index);
      if (piece.decoded.length > 0) this.#codec.decode(stream, { keys, values }, piece.decoded);
      using tables = rowTables(stream.device, segments.map((segment) => seenOf(segment, slots, piece)));
      yield { keys, values, blockTable: tables.blockTable, keyCounts: tables.keyCounts };
    }
  }

  /** Enqueues the copies of what is staged of a piece, behind the attention that is enqueued so far. */
  #begin(stream: Stream, slots: readonly SeenSlot[], index: number): Piece | undefined {
    const { blocksOfHead, halves, pool } = this.#scratch;
    const width = Math.floor(blocksOfHead / slots.length);
    const kvHeads = slots[0]?.seen.length ?? 0;
    const firstOfHalf = (index % halves) * blocksOfHead * kvHeads;
    const firstBlock = (slot: number, kvHead: number) => firstOfHalf + (slot * kvHeads + kvHead) * width;
    const [start, end] = halves === 1 ? [index * width, (index + 1) * width] : growingPiece(index, width);
    const places = slots.map(({ seen }) => seen.map((each) => each.slice(start, end)));
    const moves = slots.flatMap(({ codes }, slot) =>
      (places[slot] ?? []).flatMap((own, kvHead) =>
        own.map((place, at) => ({
          kvHead,
          from: codes.at(kvHead, place) ?? NaN,
          staged: codes.staged.at(kvHead, place) ?? notStaged,
          to: firstBlock(slot, kvHead) + at,
        })),
      ),
    );
    if (moves.length === 0) return undefined;
    const { staged } = this.#codec;
    const fetched = moves.filter((move) => move.staged !== notStaged);
    if (staged !== undefined && fetched.length > 0) staged.fetch(staged.link.behind(stream), pool, fetched);
    return { places, firstBlock, decoded: moves.filter((move) => move.staged === notStaged) };
  }
}

/**
 * Which blocks of a kv head a piece of these has that comes over the link: twice as many as the one before, up to `most`.
 * The first is there when the rows have attended to their own chunk, and each other one when they have to the one before.
 */
function growingPiece(index: number, most: number): readonly [start: number, end: number] {
  let [start, size] = [0, Math.max(1, Math.floor(most / 8))];
  for (let piece = 0; piece < index; piece += 1) [start, size] = [start + size, Math.min(2 * size, most)];
  return [start, start + size];
}

/** What the kv heads of a segment see of a piece. */
function seenOf({ slot, seen }: PromptSegment, slots: readonly SeenSlot[], { places, firstBlock }: Piece): ReadBlocks[] {
  const of = slots.findIndex((each) => each.slot === slot);
  const sinkBlocks = slots[of]?.sinkBlocks ?? 0;
  return (places[of] ?? []).map((own, kvHead) => {
    const first = firstBlock(of, kvHead);
    return { ids: own.flatMap((place, at) => (sees(seen, sinkBlocks + place) ? [first + at] : [])) };
  });
}
