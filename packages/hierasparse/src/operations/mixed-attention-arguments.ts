import type { AttentionArguments, Stream, TensorHandle } from '@kv/sparse-core';
import {
  enqueueAttention,
  expectContiguous,
  expectDType,
  expectShape,
  loadAddon,
  nativeOf,
  type NativeTensor,
} from '@kv/sparse-core/native';
import type { MixedBlocks } from '../mixed-blocks.js';
import { nativeDense, nativeSparse } from './block-arguments.js';

export interface MixedAttentionArguments extends Omit<AttentionArguments, 'blocks'> {
  readonly keys: MixedBlocks;
  /** Of the same heads, and dense blocks of the same number as the keys'. */
  readonly values: MixedBlocks;
  /** i32: how many tokens each kv head of each slot holds. A sparse block has 64 of them. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** False promises that no block that is read is sparse, so that it need not be asked. Default: true. */
  readonly sparseKeys?: boolean | undefined;
  readonly sparseValues?: boolean | undefined;
}

/**
 * Checks the arguments of attention over mixed blocks and enqueues it.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function enqueueMixedAttention(
  operation: 'mixedPrefillAttention' | 'mixedDecodeAttention',
  stream: Stream,
  { keys, values, keyCounts, sparseKeys = true, sparseValues = true, ...rows }: MixedAttentionArguments,
): void {
  const sparse = {
    keys: nativeBlocks(operation, 'keys', keys, stream),
    values: nativeBlocks(operation, 'values', values, stream),
  };
  const valueTable = nativeOf(operation, 'values.table', values.table, stream).native;
  expectDType(operation, 'values.table', values.table, ['i32']);
  expectShape(operation, 'values.table', values.table, keys.table.shape);
  expectContiguous(operation, 'values.table', values.table);
  const blocks = { keys: keys.dense, values: values.dense, blockTable: keys.table, keyCounts };
  enqueueAttention(operation, stream, { ...rows, blocks }, (...natives) => {
    loadAddon()[operation](
      stream.native,
      ...natives,
      valueTable,
      sparse.keys.nonZeros,
      sparse.values.nonZeros,
      sparse.keys.metadata,
      sparse.values.metadata,
      sparseKeys,
      sparseValues,
    );
  });
}

function nativeBlocks(
  operation: string,
  name: string,
  { dense, sparse }: MixedBlocks,
  stream: Stream,
): { nonZeros: NativeTensor; metadata: NativeTensor } {
  nativeDense(operation, `${name}.dense`, dense, stream);
  const [nonZeros, metadata] = nativeSparse(operation, sparse, dense, stream);
  return { nonZeros, metadata };
}
