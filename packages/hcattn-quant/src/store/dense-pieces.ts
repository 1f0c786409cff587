import type { KvCapacity, KvLayer, PagedBlocks, Stream } from '@kv/sparse-core';
import { type SlotBlocks, SlotTable } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import type { AttentionScratch } from './attention-scratch.js';
import type { BlockCodec, BlockMove } from './block-codec.js';

/** A slot of a batch and its quantized blocks. */
export interface QuantizedSlot {
  readonly slot: number;
  readonly blocks: SlotBlocks;
}

/** The quantized blocks of slots as dense ones, a piece of each sequence at a time. */
export class DensePieces {
  readonly #scratch: AttentionScratch;
  readonly #codec: BlockCodec;
  /** Which of the scratch's blocks a piece of each slot is in. */
  readonly #slots: SlotTable<undefined, 'blocks'>;
  readonly #kvHeads: number;

  /** @throws OutOfMemoryError */
  constructor(layer: KvLayer, capacity: KvCapacity, codec: BlockCodec, scratch: AttentionScratch) {
    const tokensPerSlot = Math.min(capacity.tokensPerSlot, scratch.blocksOfHead * blockTokens);
    const empty = () => undefined;
    this.#slots = new SlotTable({ layer, capacity: { ...capacity, tokensPerSlot }, blockTokens, tables: ['blocks'], empty });
    this.#scratch = scratch;
    this.#codec = codec;
    this.#kvHeads = layer.kvHeads;
  }

  get byteLength(): number {
    return this.#slots.byteLength;
  }

  /** Enqueues the writing of each piece, one after the other; each is valid until the next is asked for. */
  *of(stream: Stream, slots: readonly QuantizedSlot[]): Generator<PagedBlocks> {
    const { keyCounts, tables } = this.#slots;
    const { keys, values } = this.#scratch.pool;
    const width = Math.min(tables.blocks.shape[2], Math.floor(this.#scratch.blocksOfHead / slots.length));
    const most = Math.max(...slots.flatMap(({ blocks }) => blocks.heads.map(({ length }) => length)));
    for (let first = 0; first < most; first += width) {
      this.#write(stream, slots, first, width);
      yield { keys, values, blockTable: tables.blocks, keyCounts };
    }
  }

  #write(stream: Stream, slots: readonly QuantizedSlot[], first: number, width: number): void {
    const table = this.#slots.tables.blocks;
    const moves: BlockMove[] = [];
    slots.forEach(({ slot, blocks }, index) => {
      const row = new Int32Array(this.#kvHeads * table.shape[2]);
      const counts = blocks.heads.map((ids, kvHead) => {
        const piece = ids.subarray(first, first + width);
        const firstPlace = (index * this.#kvHeads + kvHead) * width;
        piece.forEach((id, place) => {
          moves.push({ kvHead, from: id, to: firstPlace + place });
          row[kvHead * table.shape[2] + place] = firstPlace + place;
        });
        return piece.length * blockTokens;
      });
      stream.write(table.slice('slot', slot, slot + 1), row);
      this.#slots.write(stream, slot, counts);
    });
    const { keys, values } = this.#scratch.pool;
    this.#codec.decode(stream, { keys, values }, moves);
  }

  dispose(): void {
    this.#slots.dispose();
  }
}
