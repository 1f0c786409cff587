import type { Device } from '@kv/sparse-core';
import { DescendingSlots, type Random } from '@kv/sparse-core/testing';
import { type AttentionBits, blockTokens, type CodeBits, groupDims, quantizedBlockBytes } from '../quantized-blocks.js';
import { decoded, dequantized } from './quantized-oracle.js';

export interface QuantizedSizes<Bits extends CodeBits = AttentionBits> {
  /** Rows of each batch entry. */
  readonly rows: readonly number[];
  /** Quantized blocks of each batch entry and kv head. */
  readonly blocks: readonly (readonly number[])[];
  readonly kvHeads: number;
  /** Query heads of each kv head. */
  readonly group: number;
  readonly headDim: number;
  readonly keyBits: Bits;
  readonly valueBits: Bits;
  /** Moves the bytes of the keys' scales: 8 doubles every key. */
  readonly louder?: number | undefined;
}

/** Blocks of random codes. Scales are those of numbers of about 1, some smaller, some larger. */
function randomPool(random: Random, count: number, headDim: number, bits: CodeBits, louder: number): Uint8Array {
  const bytes = quantizedBlockBytes(headDim, bits);
  const firstScale = bytes - blockTokens * Math.ceil(headDim / groupDims);
  // Each bit less makes steps about twice as large, one more exponent.
  const middle = (bits === 8 ? 0x5c : 0x94 - 8 * bits) + louder;
  const pool = new Uint8Array(count * bytes);
  for (let index = 0; index < pool.length; index++) {
    const isScale = index % bytes >= firstScale;
    const byte = isScale ? random.integer(middle - 12, middle + 12) : random.integer(0, 255);
    pool[index] = !isScale && bits === 8 && byte === 128 ? 0 : byte;
  }
  return pool;
}

/** A cache of quantized blocks: they lie in random order, slots in descending order. */
export function randomQuantizedCache<Bits extends CodeBits>(device: Device, random: Random, sizes: QuantizedSizes<Bits>) {
  const { rows, blocks, kvHeads, headDim, keyBits, valueBits, louder = 0 } = sizes;
  const batch = rows.length;
  const width = Math.max(1, ...blocks.flat());
  const order = random.permutation(batch * kvHeads * width);
  const counts = blocks.map((heads) => heads.map((count) => count * blockTokens));
  const sequences = new DescendingSlots(rows, counts, kvHeads);
  const keys = randomPool(random, order.length, headDim, keyBits, louder);
  const values = randomPool(random, order.length, headDim, valueBits, 0);
  const rowsOf = (pool: Uint8Array, bits: CodeBits, read: typeof decoded) => {
    const bytes = quantizedBlockBytes(headDim, bits);
    // Tests may spoil the pool, and most read few of its blocks.
    const sound = pool.slice();
    const blocks: Float64Array[] = [];
    return (entry: number, kvHead: number, token: number): Float64Array => {
      const place = sequences.tableRow(entry, kvHead) * width + Math.floor(token / blockTokens);
      const block = order[place] ?? NaN;
      const all = (blocks[block] ??= read(sound.subarray(block * bytes, (block + 1) * bytes), headDim, bits));
      const first = (token % blockTokens) * headDim;
      return all.subarray(first, first + headDim);
    };
  };
  const pool = (bytes: Uint8Array) => device.tensor('u8', ['quantizedBlock', 'byte'], [order.length, bytes.length / order.length], bytes);
  return {
    arguments: {
      quantizedKeys: pool(keys),
      quantizedValues: pool(values),
      keyBits,
      valueBits,
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [batch, kvHeads, width], order),
      ...sequences.place(device),
    },
    starts: sequences.queryStart,
    /** The bytes of the pools, and where in them a token's first scale lies. */
    bytes: { keys, values },
    scaleAt(operand: 'keys' | 'values', entry: number, kvHead: number, token: number): number {
      const bits = operand === 'keys' ? keyBits : valueBits;
      const place = sequences.tableRow(entry, kvHead) * width + Math.floor(token / blockTokens);
      const groups = Math.ceil(headDim / groupDims);
      return (
        ((order[place] ?? NaN) + 1) * quantizedBlockBytes(headDim, bits) - (blockTokens - (token % blockTokens)) * groups
      );
    },
    /** Rotated. */
    key: rowsOf(keys, keyBits, decoded),
    /** Rotated back. */
    value: rowsOf(values, valueBits, dequantized),
  };
}
