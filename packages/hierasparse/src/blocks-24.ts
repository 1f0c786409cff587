import type { FloatDType, TensorHandle } from '@kv/sparse-core';

/** Tokens of a block. */
export const blockTokens = 64;

/** Dims of a head that blocks may be made sparse with. */
export const headDims: readonly number[] = [64, 128];

/** Elements that sparse tensor cores take. */
export const sparseDTypes = ['f16', 'bf16'] as const satisfies readonly FloatDType[];
export type SparseDType = (typeof sparseDTypes)[number];

/** Which of the two a pool of blocks holds. */
export type KvOperand = 'keys' | 'values';
export const operands = ['keys', 'values'] as const satisfies readonly KvOperand[];

/** 2:4 sparse blocks, as `native/shared/blocks-24/blocks-24.h` lays them out. */
export interface SparseBlocks24 {
  /** `[sparseBlock, element]`, `32 * dim` elements a block: two of each four neighbours. */
  readonly nonZeros: TensorHandle<SparseDType, readonly ['sparseBlock', 'element']>;
  /** u32 `[sparseBlock, word]`, `2 * dim` words a block: which two. */
  readonly metadata: TensorHandle<'u32', readonly ['sparseBlock', 'word']>;
}

/** Keys or values in dense and sparse blocks of 64 tokens of one kv head. */
export interface Blocks24 {
  /** `[block, blockToken, dim]` */
  readonly dense: TensorHandle<SparseDType, readonly ['block', 'blockToken', 'dim']>;
  readonly sparse: SparseBlocks24;
  /** i32 entries, as `blockEntry` of `@kv/sparse-core/native` makes them: a dense block's is its number. */
  readonly table: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
}

/** What the blocks of sequences lose if they become sparse: any numbers, NaN last. */
export type BlockLoss = TensorHandle<'f32', readonly ['slot', 'kvHead', 'block']>;

/** Elements of a sparse block's non-zeros. */
export function sparseBlockElements(headDim: number): number {
  return (blockTokens * headDim) / 2;
}

/** Words of a sparse block's metadata: two bits for each element that is kept. */
export function sparseBlockWords(headDim: number): number {
  return (blockTokens * headDim) / 32;
}
