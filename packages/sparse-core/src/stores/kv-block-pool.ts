import type { Device } from '../device.js';
import { byteSize, type FloatDType } from '../dtype.js';
import type { Tensor } from '../tensor.js';
import { BlockIds } from './block-ids.js';

export interface KvBlockPoolOptions {
  readonly device: Device;
  readonly dtype: FloatDType;
  readonly headDim: number;
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  readonly blocks: number;
}

/** Fixed-size blocks of keys and values, handed out by their numbers. */
export class KvBlockPool {
  readonly keys: Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly values: Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly blockTokens: number;
  /** Bytes of one block's keys and values. */
  readonly blockBytes: number;
  readonly ids: BlockIds;

  constructor({ device, dtype, headDim, blockTokens, blocks }: KvBlockPoolOptions) {
    const shape = [blocks, blockTokens, headDim] as const;
    this.keys = device.tensor(dtype, ['block', 'blockToken', 'dim'], shape);
    try {
      this.values = device.tensor(dtype, ['block', 'blockToken', 'dim'], shape);
    } catch (error) {
      this.keys.dispose();
      throw error;
    }
    this.blockTokens = blockTokens;
    this.blockBytes = 2 * blockTokens * headDim * byteSize(dtype);
    this.ids = new BlockIds('kv blocks', blocks);
  }

  dispose(): void {
    this.keys.dispose();
    this.values.dispose();
  }
}
