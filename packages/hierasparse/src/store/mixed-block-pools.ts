import { byteSize, type Device, type Tensor } from '@kv/sparse-core';
import {
  blockTokens,
  type KvOperand,
  sparseBlockElements,
  sparseBlockWords,
  type SparseDType,
} from '../mixed-blocks.js';
import { BlockIds, expectAvailable } from './block-ids.js';

type DensePool = Tensor<SparseDType, readonly ['block', 'blockToken', 'dim']>;

export interface PoolOptions {
  readonly device: Device;
  readonly dtype: SparseDType;
  readonly headDim: number;
  readonly denseBlocks: number;
  readonly sparseBlocks: { readonly keys: number; readonly values: number };
}

/**
 * The blocks that all layers of a cache share: dense ones of keys and of values, and sparse ones of each.
 *
 * A new token block takes a dense block of keys and one of values under the same number. They are returned one by one,
 * and a number is given out again when both are back: as long as nothing of a slot is sparse, one table names both.
 */
export class MixedBlockPools {
  /**
   * `[1 + block, blockToken, dim]`. The first block is never used: an index map, which counts blocks from 1, is so the
   * block table of this pool wherever it has no sparse entries.
   */
  readonly padded: { readonly keys: DensePool; readonly values: DensePool };
  /** `[block, blockToken, dim]` */
  readonly dense: { readonly keys: DensePool; readonly values: DensePool };
  readonly sparse: { readonly keys: SparsePool; readonly values: SparsePool };
  /** Bytes of a dense block of keys or of values, and of a sparse one. */
  readonly denseBytes: number;
  readonly sparseBytes: number;
  readonly #pairs: BlockIds;
  /** Numbers of which one of the two is back. */
  readonly #halves = new Set<number>();

  constructor({ device, dtype, headDim, denseBlocks, sparseBlocks }: PoolOptions) {
    const made: Disposable[] = [];
    const keep = <T extends Disposable>(tensor: T): T => {
      made.push(tensor);
      return tensor;
    };
    const shape = [denseBlocks + 1, blockTokens, headDim] as const;
    const dense = () => keep(device.tensor(dtype, ['block', 'blockToken', 'dim'], shape));
    const sparse = (count: number) => keep(new SparsePool(device, dtype, headDim, count));
    try {
      this.padded = { keys: dense(), values: dense() };
      this.sparse = { keys: sparse(sparseBlocks.keys), values: sparse(sparseBlocks.values) };
    } catch (error) {
      for (const each of made) each[Symbol.dispose]();
      throw error;
    }
    const behindFirst = (pool: DensePool) => pool.slice('block', 1, denseBlocks + 1);
    this.dense = { keys: behindFirst(this.padded.keys), values: behindFirst(this.padded.values) };
    this.denseBytes = blockTokens * headDim * byteSize(dtype);
    this.sparseBytes =
      sparseBlockElements(headDim) * byteSize(dtype) + sparseBlockWords(headDim) * byteSize('u32');
    this.#pairs = new BlockIds('dense blocks', denseBlocks);
  }

  /**
   * @param becomeSparse how many more sparse blocks the heads that take them may need
   * @throws OutOfMemoryError when fewer are available; none is taken then
   */
  allocatePairs(count: number, becomeSparse: Readonly<Record<KvOperand, number>>): number[] {
    this.sparse.keys.expectUnpromised(becomeSparse.keys);
    this.sparse.values.expectUnpromised(becomeSparse.values);
    return this.#pairs.allocate(count);
  }

  freePairs(ids: Iterable<number>): void {
    this.#pairs.free(ids);
  }

  /** Returns the block of the keys, or that of the values, of each number. */
  freeHalves(ids: Iterable<number>): void {
    for (const id of ids) {
      if (this.#halves.delete(id)) this.#pairs.free([id]);
      else this.#halves.add(id);
    }
  }

  dispose(): void {
    for (const operand of ['keys', 'values'] as const satisfies readonly KvOperand[]) {
      this.padded[operand].dispose();
      this.sparse[operand][Symbol.dispose]();
    }
  }
}

class SparsePool implements Disposable {
  /** Blocks that heads have or may need: a prompt that is admitted can become sparse when it ends. */
  promised = 0;
  readonly nonZeros: Tensor<SparseDType, readonly ['sparseBlock', 'element']>;
  readonly metadata: Tensor<'u32', readonly ['sparseBlock', 'word']>;
  readonly ids: BlockIds;

  constructor(device: Device, dtype: SparseDType, headDim: number, blocks: number) {
    this.nonZeros = device.tensor(dtype, ['sparseBlock', 'element'], [blocks, sparseBlockElements(headDim)]);
    try {
      this.metadata = device.tensor('u32', ['sparseBlock', 'word'], [blocks, sparseBlockWords(headDim)]);
    } catch (error) {
      this.nonZeros.dispose();
      throw error;
    }
    this.ids = new BlockIds('sparse blocks', blocks);
  }

  /** @throws OutOfMemoryError unless `count` blocks are there that nobody was promised */
  expectUnpromised(count: number): void {
    const [all] = this.nonZeros.shape;
    expectAvailable('sparse blocks', count, all - this.promised, all);
  }

  [Symbol.dispose](): void {
    this.nonZeros.dispose();
    this.metadata.dispose();
  }
}
