import { byteSize, type Device, type Tensor } from '@kv/sparse-core';
import { BlockIds } from '@kv/sparse-core/native';
import {
  blockTokens,
  type KvOperand,
  sparseBlockElements,
  sparseBlockWords,
  type SparseDType,
} from '../blocks-24.js';
import type { PoolSizes } from './pool-sizes.js';

type DensePool = Tensor<SparseDType, readonly ['block', 'blockToken', 'dim']>;

export interface PoolOptions {
  readonly device: Device;
  readonly dtype: SparseDType;
  readonly headDim: number;
  readonly sizes: PoolSizes;
}

/** Blocks that a head may come to need: sparse ones of keys and of values, and single dense ones. */
export type BlockNeeds = Readonly<Record<KvOperand | 'singles', number>>;

export function sumOfNeeds(needs: readonly (BlockNeeds | undefined)[]): BlockNeeds {
  const sum = (kind: keyof BlockNeeds) => needs.reduce((total, each) => total + (each?.[kind] ?? 0), 0);
  return { keys: sum('keys'), values: sum('values'), singles: sum('singles') };
}

/**
 * The blocks that all layers of a cache share.
 *
 * Dense ones of keys and of values are of one pool. New tokens go into pairs, a block of keys and one of values at the
 * same place of their parts of the pool, so that one table names both; a pair is given out again when both are back.
 * Behind the pairs are single blocks of either, for those that leave their pair and stay dense.
 */
export class BlockPools24 {
  /** `[block, blockToken, dim]`: pair n has its keys at n and its values at `pairs + n`; singles follow. */
  readonly dense: DensePool;
  /** `[pair, blockToken, dim]`: the parts of the pairs. An index map is the block table of both wherever it names pairs. */
  readonly paired: { readonly keys: DensePool; readonly values: DensePool };
  readonly sparse: { readonly keys: SparsePool; readonly values: SparsePool };
  /** Held once for each of its two blocks. */
  readonly pairIds: BlockIds;
  readonly singleIds: BlockIds;
  /** Bytes of a dense block of keys or of values, and of a sparse one. */
  readonly denseBytes: number;
  readonly sparseBytes: number;
  /** Of all blocks, in use or not. */
  readonly bytes: number;
  readonly #pairs: number;

  constructor({ device, dtype, headDim, sizes }: PoolOptions) {
    const made: Disposable[] = [];
    const keep = <T extends Disposable>(tensor: T): T => {
      made.push(tensor);
      return tensor;
    };
    const { pairs, singles, spareSingles } = sizes;
    const shape = [2 * pairs + singles + spareSingles, blockTokens, headDim] as const;
    const sparse = (operand: KvOperand) => keep(new SparsePool(device, dtype, headDim, sizes.sparse[operand]));
    try {
      this.dense = keep(device.tensor(dtype, ['block', 'blockToken', 'dim'], shape));
      this.sparse = { keys: sparse('keys'), values: sparse('values') };
    } catch (error) {
      for (const each of made) each[Symbol.dispose]();
      throw error;
    }
    this.paired = { keys: this.dense.slice('block', 0, pairs), values: this.dense.slice('block', pairs, 2 * pairs) };
    this.denseBytes = blockTokens * headDim * byteSize(dtype);
    this.sparseBytes =
      sparseBlockElements(headDim) * byteSize(dtype) + sparseBlockWords(headDim) * byteSize('u32');
    this.bytes = this.dense.byteLength + this.sparse.keys.byteLength + this.sparse.values.byteLength;
    this.#pairs = pairs;
    this.pairIds = new BlockIds('dense blocks', pairs);
    this.singleIds = new BlockIds('blocks that stay dense', singles + spareSingles, spareSingles);
  }

  /** Where the block of the keys, or that of the values, of a pair is in the dense pool. */
  placeOf(operand: KvOperand, pair: number): number {
    return operand === 'keys' ? pair : this.#pairs + pair;
  }

  /** The same of several. A loop, as others here: a chunk of a prompt has thousands, and a call for each takes milliseconds. */
  placesOf(operand: KvOperand, pairs: Int32Array): Int32Array {
    return raised(pairs, this.placeOf(operand, 0));
  }

  isSingle(place: number): boolean {
    return place >= 2 * this.#pairs;
  }

  countSingles(places: Int32Array): number {
    const { length } = places;
    let count = 0;
    for (let index = 0; index < length; index++) {
      if (this.isSingle(places[index] ?? NaN)) count += 1;
    }
    return count;
  }

  /** The number of the pair, or of the single, at a place. */
  idAt(place: number): number {
    if (this.isSingle(place)) return place - 2 * this.#pairs;
    return place < this.#pairs ? place : place - this.#pairs;
  }

  /** @throws OutOfMemoryError unless so many blocks are there that nobody was promised */
  expectUnpromised({ keys, values, singles }: BlockNeeds): void {
    this.sparse.keys.ids.expectUnpromised(keys);
    this.sparse.values.ids.expectUnpromised(values);
    this.singleIds.expectUnpromised(singles);
  }

  promise({ keys, values, singles }: BlockNeeds): void {
    this.sparse.keys.ids.promised += keys;
    this.sparse.values.ids.promised += values;
    this.singleIds.promised += singles;
  }

  /** @throws OutOfMemoryError when fewer are available; none is taken then */
  allocatePairs(count: number): Int32Array {
    const pairs = this.pairIds.allocate(count);
    this.pairIds.share(pairs);
    return pairs;
  }

  allocateSingles(count: number): Int32Array {
    return raised(this.singleIds.allocate(count), 2 * this.#pairs);
  }

  /** A holder more for each of these dense blocks. */
  shareDense(places: Int32Array): void {
    const { length } = places;
    for (let index = 0; index < length; index++) {
      const place = places[index] ?? NaN;
      this.#idsOf(place).shareOne(this.idAt(place));
    }
  }

  /** A holder less for each of these dense blocks. */
  freeDense(places: Int32Array): void {
    const { length } = places;
    for (let index = 0; index < length; index++) {
      const place = places[index] ?? NaN;
      this.#idsOf(place).freeOne(this.idAt(place));
    }
  }

  /** A holder more for both blocks of each pair. */
  sharePairs(pairs: Int32Array): void {
    this.pairIds.share(pairs);
    this.pairIds.share(pairs);
  }

  /** A holder less for both blocks of each pair. */
  freePairs(pairs: Int32Array): void {
    this.pairIds.free(pairs);
    this.pairIds.free(pairs);
  }

  dispose(): void {
    this.dense.dispose();
    this.sparse.keys[Symbol.dispose]();
    this.sparse.values[Symbol.dispose]();
  }

  #idsOf(place: number): BlockIds {
    return this.isSingle(place) ? this.singleIds : this.pairIds;
  }
}

/** Each number and `by` more. */
function raised(numbers: Int32Array, by: number): Int32Array {
  const { length } = numbers;
  const sums = new Int32Array(length);
  for (let index = 0; index < length; index++) sums[index] = (numbers[index] ?? NaN) + by;
  return sums;
}

class SparsePool implements Disposable {
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

  get byteLength(): number {
    return this.nonZeros.byteLength + this.metadata.byteLength;
  }

  [Symbol.dispose](): void {
    this.nonZeros.dispose();
    this.metadata.dispose();
  }
}
