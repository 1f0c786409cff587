import { byteSize, type FloatDType } from '../dtype.js';
import { copyBlocks } from '../operations/copy-blocks.js';
import { BlockIds } from './block-ids.js';
import type { Stream, Tensor } from '../handles.js';
import type { HostMemory } from './host-memory.js';

export interface KvBlockPoolOptions {
  /** Makes its tensor: a device, or host memory that the device reaches. */
  readonly memory: HostMemory;
  readonly dtype: FloatDType;
  readonly headDim: number;
  /** Consecutive tokens of one kv head in a block. */
  readonly blockTokens: number;
  readonly blocks: number;
}

type Blocks = Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;

/** Fixed-size blocks of keys and values, handed out by their numbers. */
export class KvBlockPool {
  readonly keys: Blocks;
  readonly values: Blocks;
  readonly blockTokens: number;
  /** Bytes of one block's keys and values. */
  readonly blockBytes: number;
  readonly ids: BlockIds;
  /** The keys, and behind them the values. */
  readonly #both: Blocks;

  constructor({ memory, dtype, headDim, blockTokens, blocks }: KvBlockPoolOptions) {
    this.#both = memory.tensor(dtype, ['block', 'blockToken', 'dim'], [2 * blocks, blockTokens, headDim]);
    this.keys = this.#both.slice('block', 0, blocks);
    this.values = this.#both.slice('block', blocks, 2 * blocks);
    this.blockTokens = blockTokens;
    this.blockBytes = 2 * blockTokens * headDim * byteSize(dtype);
    this.ids = new BlockIds('kv blocks', blocks);
  }

  get byteLength(): number {
    return this.#both.byteLength;
  }

  /** Copies blocks, keys and values, onto others. */
  copy(stream: Stream, from: readonly number[], to: readonly number[]): void {
    const inBoth = (ids: readonly number[]) => [...ids, ...ids.map((id) => this.ids.count + id)];
    copyBlocks(stream, { pool: this.#both, from: inBoth(from), to: inBoth(to) });
  }

  dispose(): void {
    this.#both.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
