import type { Stream } from '@kv/sparse-core';
import { DescendingSlots, type Random } from '@kv/sparse-core/testing';
import { codedBlockBytes } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';
import { decodedKeys, PooledBlock } from './coded-keys-oracle.js';
import { type BookSizes, placedCodebooks } from './placed-codebooks.js';

export interface CodedSizes extends BookSizes {
  /** Rows of each batch entry. */
  readonly rows: readonly number[];
  /** Coded blocks of each batch entry and kv head. */
  readonly blocks: readonly (readonly number[])[];
  /** Query heads of each kv head. */
  readonly group: number;
  /** Default: as many as tell the centroids apart. */
  readonly codeBits?: number | undefined;
}

/** A cache of coded blocks of random codes: they lie in random order, slots in descending order. */
export async function randomCodedCache(stream: Stream, random: Random, sizes: CodedSizes, given?: Uint16Array) {
  const { rows, blocks, kvHeads, groups, centroids, headDim } = sizes;
  const { placed, oracle } = await placedCodebooks(stream, random, sizes, given);
  const codeBits = sizes.codeBits ?? placed.codeBits;
  const batch = rows.length;
  const width = Math.max(1, ...blocks.flat());
  const order = random.permutation(batch * kvHeads * width);
  const counts = blocks.map((heads) => heads.map((count) => count * blockTokens));
  const sequences = new DescendingSlots(rows, counts, kvHeads);
  const bytes = codedBlockBytes(groups, codeBits);
  const pool = new Uint8Array(order.length * bytes);
  // Of each place in the table.
  const codes = Array.from(order, (block) => {
    const drawn = Uint16Array.from({ length: blockTokens * groups }, () => random.integer(0, centroids - 1));
    new PooledBlock(pool, block, groups, codeBits).write(drawn, groups, codeBits);
    return drawn;
  });
  const { device } = stream;
  return {
    arguments: {
      ...placed,
      codeBits,
      codedKeys: device.tensor('u8', ['codedBlock', 'byte'], [order.length, bytes], pool),
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [batch, kvHeads, width], order),
      ...sequences.place(device),
    },
    starts: sequences.queryStart,
    width,
    /** The keys of one block of an entry, `[token][dim]`. */
    keys(entry: number, kvHead: number, block: number): Float64Array {
      const drawn = codes[sequences.tableRow(entry, kvHead) * width + block];
      const books = oracle[kvHead];
      return drawn === undefined || books === undefined ? new Float64Array(blockTokens * headDim).fill(NaN) : decodedKeys(drawn, books);
    },
  };
}
