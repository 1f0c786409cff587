import type { Device, Stream, Tensor } from '@kv/sparse-core';
import {
  blockTokens,
  type Blocks24,
  sparseBlockElements,
  sparseBlockWords,
  type SparseDType,
} from '../blocks-24.js';

export interface PoolSizes {
  readonly dtype: SparseDType;
  readonly headDim: number;
  readonly denseBlocks: number;
  readonly sparseBlocks: number;
  /** Slots, kv heads and blocks of the table. */
  readonly table: readonly [number, number, number];
}

/** Pools of blocks with given contents; sparse ones are poisoned. */
export interface TestPools extends Blocks24 {
  readonly dense: Tensor<SparseDType, readonly ['block', 'blockToken', 'dim']>;
  readonly table: Tensor<'i32', readonly ['slot', 'kvHead', 'block']>;
}

export function testPools(
  device: Device,
  sizes: PoolSizes,
  dense: Uint16Array,
  table: Int32Array,
): TestPools {
  const { dtype, headDim, denseBlocks, sparseBlocks } = sizes;
  const elements = sparseBlockElements(headDim);
  const words = sparseBlockWords(headDim);
  return {
    dense: device.tensor(dtype, ['block', 'blockToken', 'dim'], [denseBlocks, blockTokens, headDim], dense),
    sparse: {
      nonZeros: device.tensor(
        dtype,
        ['sparseBlock', 'element'],
        [sparseBlocks, elements],
        new Uint16Array(sparseBlocks * elements).fill(0x7e01),
      ),
      metadata: device.tensor(
        'u32',
        ['sparseBlock', 'word'],
        [sparseBlocks, words],
        new Uint32Array(sparseBlocks * words).fill(0xdeadbeef),
      ),
    },
    table: device.tensor('i32', ['slot', 'kvHead', 'block'], sizes.table, table),
  };
}

/** What the blocks of one row of the table hold, and where; poisoned pools read like any other. */
export interface ReadBlocks {
  readonly table: Int32Array;
  readonly dense: (id: number) => Uint16Array;
  readonly nonZeros: (id: number) => Uint16Array;
  readonly metadata: (id: number) => Uint32Array;
}

export async function readPools(stream: Stream, pools: Blocks24): Promise<ReadBlocks> {
  const part =
    <T extends Uint16Array | Uint32Array>(all: T, length: number) =>
    (id: number) =>
      all.slice(id * length, (id + 1) * length) as T;
  const headDim = pools.dense.shape[2];
  const dense = await pools.dense.read(stream);
  const nonZeros = await pools.sparse.nonZeros.read(stream);
  const metadata = await pools.sparse.metadata.read(stream);
  return {
    table: await pools.table.read(stream),
    dense: part(dense, blockTokens * headDim),
    nonZeros: part(nonZeros, sparseBlockElements(headDim)),
    metadata: part(metadata, sparseBlockWords(headDim)),
  };
}
