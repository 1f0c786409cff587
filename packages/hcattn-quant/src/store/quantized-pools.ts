import type { AttentionPart, Device, KvBytes, Stream, Tensor } from '@kv/sparse-core';
import { BlockIds, madeTogether } from '@kv/sparse-core/native';
import { decodeAttentionQuantized } from '../operations/decode-attention-quantized.js';
import { dequantizeKv } from '../operations/dequantize-kv.js';
import { quantizeKv } from '../operations/quantize-kv.js';
import { type AttentionBits, quantizedBlockBytes } from '../quantized-blocks.js';
import { type BlockCodec, type BlockMove, type CodeCache, type DenseBlocks, listsOf, type RowsOverBlocks } from './block-codec.js';

type Pool = Tensor<'u8', readonly ['quantizedBlock', 'byte']>;

/** As operations over codes take them. */
interface Codes {
  readonly quantizedKeys: Pool;
  readonly quantizedValues: Pool;
  readonly keyBits: AttentionBits;
  readonly valueBits: AttentionBits;
}

export interface QuantizedPoolsOptions {
  readonly device: Device;
  readonly headDim: number;
  readonly keyBits: AttentionBits;
  readonly valueBits: AttentionBits;
  readonly blocks: number;
}

/** Keys and values in codes of 8 or 4 bits on the device, for all layers of a cache. */
export class QuantizedPools implements BlockCodec, CodeCache {
  readonly mostRows = Infinity;
  readonly fetches = false;
  readonly ids: BlockIds;
  readonly blockBytes: KvBytes;
  readonly #codes: Codes;

  /** @throws OutOfMemoryError; CapabilityError for heads that are too large */
  constructor({ device, headDim, keyBits, valueBits, blocks }: QuantizedPoolsOptions) {
    const [keyBytes, valueBytes] = [quantizedBlockBytes(headDim, keyBits), quantizedBlockBytes(headDim, valueBits)];
    const pool = (bytes: number): Pool => device.tensor('u8', ['quantizedBlock', 'byte'], [blocks, bytes]);
    this.#codes = madeTogether((own) => ({
      quantizedKeys: own(pool(keyBytes)),
      quantizedValues: own(pool(valueBytes)),
      keyBits,
      valueBits,
    }));
    this.ids = new BlockIds('quantized blocks', blocks);
    this.blockBytes = { device: keyBytes + valueBytes, host: 0 };
  }

  encode(stream: Stream, dense: DenseBlocks, moves: readonly BlockMove[]): void {
    quantizeKv(stream, { ...dense, ...this.#codes, ...listsOf(moves) });
  }

  decode(stream: Stream, dense: DenseBlocks, moves: readonly BlockMove[]): void {
    dequantizeKv(stream, { ...dense, ...this.#codes, ...listsOf(moves) });
  }

  write(): void {
    // The table and the count say all.
  }

  attend(stream: Stream, rows: RowsOverBlocks, part: AttentionPart): void {
    decodeAttentionQuantized(stream, { ...rows, ...part, ...this.#codes, merge: true });
  }

  codecOf(): BlockCodec {
    return this;
  }

  reserved(): KvBytes {
    return { device: this.#codes.quantizedKeys.byteLength + this.#codes.quantizedValues.byteLength, host: 0 };
  }

  [Symbol.dispose](): void {
    this.#codes.quantizedKeys.dispose();
    this.#codes.quantizedValues.dispose();
  }
}
