import type { Stream } from '@kv/sparse-core';
import { expectShape, loadAddon, nativeOf } from '@kv/sparse-core/native';
import type { KvOperand, MixedBlocks, SparseBlocks } from '../mixed-blocks.js';
import { expectOperand, expectSparseIds, nativeDense, nativeSparse } from './block-arguments.js';

export interface Decompress24Arguments {
  readonly operand: KvOperand;
  readonly sparse: SparseBlocks;
  /** Which sparse blocks to write out. */
  readonly ids: readonly number[];
  /** `[block, blockToken, dim]`, contiguous: one block for each id. */
  readonly dense: MixedBlocks['dense'];
}

/**
 * Writes sparse blocks out as dense ones, zero where nothing was kept: the inverse of `compress24`.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for an id that the pool does not have; blocks that begin inside 16 bytes reject the stream's
 * next wait with a CapabilityError
 */
export function decompress24(stream: Stream, { operand, sparse, ids, dense }: Decompress24Arguments): void {
  expectOperand('decompress24', operand);
  const nativeBlocks = nativeDense('decompress24', 'dense', dense, stream);
  const [nonZeros, metadata] = nativeSparse('decompress24', sparse, dense, stream);
  expectShape('decompress24', 'dense', dense, [ids.length, undefined, undefined]);
  expectSparseIds('decompress24', ids, sparse);
  using nativeIds = stream.device.tensor('i32', ['id'], [ids.length], Int32Array.from(ids));
  loadAddon().decompress24(stream.native, operand === 'values', nonZeros, metadata, nativeIds.native, nativeBlocks);
  nativeOf('decompress24', 'dense', dense, stream).writtenBy(stream);
}
