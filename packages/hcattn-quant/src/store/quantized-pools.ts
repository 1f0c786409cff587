import type { Device, Tensor } from '@kv/sparse-core';
import { BlockIds, madeTogether } from '@kv/sparse-core/native';
import { type CodeBits, quantizedBlockBytes } from '../quantized-blocks.js';

type Pool = Tensor<'u8', readonly ['quantizedBlock', 'byte']>;

/** As operations over codes take them. */
export interface Codes {
  readonly quantizedKeys: Pool;
  readonly quantizedValues: Pool;
  readonly keyBits: CodeBits;
  readonly valueBits: CodeBits;
}

export interface QuantizedPoolsOptions {
  readonly device: Device;
  readonly headDim: number;
  readonly keyBits: CodeBits;
  readonly valueBits: CodeBits;
  readonly blocks: number;
}

/** Blocks of codes that all layers of a cache share. A block has the same number among keys and among values. */
export class QuantizedPools {
  readonly codes: Codes;
  readonly ids: BlockIds;
  /** Bytes of one block's keys and values. */
  readonly blockBytes: number;

  /** @throws OutOfMemoryError; CapabilityError for heads that are too large */
  constructor({ device, headDim, keyBits, valueBits, blocks }: QuantizedPoolsOptions) {
    const [keyBytes, valueBytes] = [quantizedBlockBytes(headDim, keyBits), quantizedBlockBytes(headDim, valueBits)];
    const pool = (bytes: number): Pool => device.tensor('u8', ['quantizedBlock', 'byte'], [blocks, bytes]);
    this.codes = madeTogether((own) => ({
      quantizedKeys: own(pool(keyBytes)),
      quantizedValues: own(pool(valueBytes)),
      keyBits,
      valueBits,
    }));
    this.ids = new BlockIds('quantized blocks', blocks);
    this.blockBytes = keyBytes + valueBytes;
  }

  get byteLength(): number {
    return this.codes.quantizedKeys.byteLength + this.codes.quantizedValues.byteLength;
  }

  [Symbol.dispose](): void {
    this.codes.quantizedKeys.dispose();
    this.codes.quantizedValues.dispose();
  }
}
