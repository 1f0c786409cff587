import type { Device } from '../device.js';
import { byteSize, type FloatDType } from '../dtype.js';
import { OutOfMemoryError } from '../errors.js';
import type { Tensor } from '../tensor.js';

export interface KvBlockPoolOptions {
  readonly device: Device;
  readonly dtype: FloatDType;
  readonly headDim: number;
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  readonly blocks: number;
}

/**
 * Fixed-size blocks of keys and values, handed out to whoever needs them. A block that is freed may be
 * handed out at once: its readers and its next writer are on the same stream.
 */
export class KvBlockPool {
  readonly keys: Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly values: Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly blockTokens: number;
  /** Bytes of one block's keys and values. */
  readonly blockBytes: number;
  readonly blocks: number;
  readonly #free: number[] = [];
  #untouched = 0;

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
    this.blocks = blocks;
  }

  get available(): number {
    return this.#free.length + this.blocks - this.#untouched;
  }

  get used(): number {
    return this.blocks - this.available;
  }

  /** @throws OutOfMemoryError when fewer are available; none is taken then */
  allocate(count: number): number[] {
    if (count > this.available) {
      throw new OutOfMemoryError(
        `The key/value cache has ${this.available} of ${this.blocks} blocks left and ${count} are needed. ` +
          'Give the cache more tokens (cacheTokens of a runner), or release sequences.',
        { subject: 'kv blocks', given: count, wanted: this.available },
      );
    }
    return Array.from({ length: count }, () => this.#free.pop() ?? this.#untouched++);
  }

  free(blocks: Iterable<number>): void {
    this.#free.push(...blocks);
  }

  dispose(): void {
    this.keys.dispose();
    this.values.dispose();
  }
}
