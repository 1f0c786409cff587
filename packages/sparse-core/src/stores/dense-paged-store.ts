import type { KvCapacity, KvLayer, KvStoreFactory } from '../contracts/kv-store.js';
import type { FloatDType } from '../dtype.js';
import { InvalidValueError } from '../errors.js';
import { show } from '../show.js';
import { floats } from '../tensor-rules.js';
import { expectOptions, expectThat } from '../validate.js';
import { DensePagedStore } from './dense-paged-layer.js';
import { expectCapacity } from './expect-capacity.js';
import type { HostMemory } from './host-memory.js';
import { KvBlockPool } from './kv-block-pool.js';
import { LayerTables } from './layer-tables.js';

export interface DensePagedOptions {
  /** Element type of the cache. Default: that of the rows if it has 16 bits, else f16. On a CPU with AMX, prompts over bf16 take less time. */
  readonly dtype?: FloatDType | undefined;
  /** Consecutive tokens of one kv head in a block. Default: 64. */
  readonly blockTokens?: number | undefined;
}

/**
 * Dense keys and values in blocks of one pool that all layers share.
 * @throws InvalidValueError for options that are none
 */
export function densePagedStore(options: DensePagedOptions = {}): KvStoreFactory {
  expectOptions('densePagedStore', options, { dtype: true, blockTokens: true });
  const { dtype, blockTokens = 64 } = options;
  expectThat('densePagedStore', 'dtype', dtype, dtype === undefined || floats.includes(dtype), floats.join(', '));
  if (!Number.isInteger(blockTokens) || blockTokens < 1) {
    throw new InvalidValueError(`blockTokens is ${show(blockTokens)}; it must be a positive whole number.`, {
      subject: 'blockTokens',
      given: blockTokens,
    });
  }
  const name = dtype === undefined || dtype === 'f16' ? 'dense' : `dense ${dtype}`;
  return { name, create: (layers, capacity) => densePagedStores(layers, capacity, { name: 'dense', dtype, blockTokens, inStep: true }) };
}

export interface DensePagedPool {
  readonly name: string;
  readonly dtype: FloatDType | undefined;
  readonly blockTokens: number;
  /** Of all layers together. Default: as many as sequences of the capacity's sizes may come to fill. */
  readonly blocks?: number | undefined;
  /** Of each layer, in a pool of its own, in place of `blocks`. */
  readonly blocksOfLayer?: number | undefined;
  /**
   * Whether all layers hold a sequence's answers alike: the first that lacks room for them makes room in all, and their tables
   * are written to by one call. Default: each layer for itself.
   */
  readonly inStep?: boolean | undefined;
  /** Where they are. Default: the device. */
  readonly memory?: HostMemory | undefined;
}

/**
 * The stores of layers, over a pool of their own. A store of another package may hold part of its tokens in them.
 * @throws OutOfMemoryError, InvalidValueError, ShapeError
 */
export function densePagedStores(
  given: readonly KvLayer[],
  capacity: KvCapacity,
  { name, dtype, blockTokens, blocks, blocksOfLayer, memory, inStep = false }: DensePagedPool,
): DensePagedStore[] {
  const layers = expectCapacity(given, capacity);
  const [first] = layers;
  if (first === undefined) return [];
  // Every sequence may leave one block of each head partly filled.
  const runs = Math.ceil(capacity.tokens / blockTokens) + capacity.slots;
  const heads = layers.reduce((sum, layer) => sum + layer.kvHeads, 0);
  const made: Disposable[] = [];
  const own = <Kind extends Disposable>(each: Kind): Kind => {
    made.push(each);
    return each;
  };
  const makePool = (count: number) =>
    own(
      new KvBlockPool({
        memory: memory ?? capacity.device,
        dtype: dtype ?? (capacity.rowDType === 'bf16' ? 'bf16' : 'f16'),
        headDim: first.headDim,
        blockTokens,
        blocks: count,
      }),
    );
  let open = layers.length;
  const close = () => {
    if (--open === 0) for (const each of made) each[Symbol.dispose]();
  };
  const stores: DensePagedStore[] = [];
  try {
    const tables = own(new LayerTables(layers, capacity, blockTokens));
    const shared = blocksOfLayer === undefined ? makePool(blocks ?? runs * heads) : undefined;
    const poolBytes = shared && shared.byteLength / layers.length;
    for (const [index, layer] of layers.entries()) {
      const pool = shared ?? makePool(blocksOfLayer ?? 0);
      stores.push(new DensePagedStore(layer, { name, capacity, pool, poolBytes: poolBytes ?? pool.byteLength, tables, index, inStep: inStep ? stores : [], close }));
    }
  } catch (error) {
    for (const store of stores) store.dispose();
    for (const each of made) each[Symbol.dispose]();
    throw error;
  }
  return stores;
}
