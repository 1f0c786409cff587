import { CapabilityError, InvalidValueError, type Stream } from '@kv/sparse-core';
import {
  expectContiguous,
  expectDType,
  expectShape,
  nativeOf,
  type NativeTensor,
} from '@kv/sparse-core/native';
import {
  type BlockLoss,
  blockTokens,
  headDims,
  type KvOperand,
  type MixedBlocks,
  operands,
  type SparseBlocks,
  sparseBlockElements,
  sparseBlockWords,
  sparseDTypes,
} from '../mixed-blocks.js';

/** @throws CapabilityError unless blocks of such heads can be sparse */
export function expectHeadDim(operation: string, headDim: number): void {
  if (headDims.includes(headDim)) return;
  throw new CapabilityError(
    `${operation}: headDim is ${headDim}; blocks can be made sparse with ${headDims.join(' or ')} dims. ` +
      'Use the dense store for this model.',
    { subject: 'headDim', given: headDim, wanted: headDims },
  );
}

/** @throws InvalidValueError unless it is one of the two */
export function expectOperand(operation: string, operand: KvOperand): void {
  if (operands.includes(operand)) return;
  throw new InvalidValueError(`${operation}: operand is ${operand as string}; it must be ${operands.join(' or ')}.`, {
    subject: 'operand',
    given: operand,
    wanted: operands,
  });
}

/** @throws InvalidValueError unless each of the numbers is one of a pool's sparse blocks */
export function expectSparseIds(operation: string, ids: readonly number[], { nonZeros }: SparseBlocks): void {
  const [blocks] = nonZeros.shape;
  const wrong = ids.findIndex((id) => !Number.isInteger(id) || id < 0 || id >= blocks);
  if (wrong === -1) return;
  throw new InvalidValueError(
    `${operation}: sparse block ${String(ids[wrong])} was given; the pool has ${blocks}, counted from 0.`,
    { subject: 'ids', given: ids[wrong], wanted: blocks },
  );
}

/**
 * Checks a pool of dense blocks.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError
 */
export function nativeDense(
  operation: string,
  name: string,
  dense: MixedBlocks['dense'],
  stream: Stream,
): NativeTensor {
  const { native } = nativeOf(operation, name, dense, stream);
  expectDType(operation, name, dense, sparseDTypes);
  expectShape(operation, name, dense, [undefined, blockTokens, undefined]);
  expectHeadDim(operation, dense.shape[2]);
  expectContiguous(operation, name, dense);
  return native;
}

/**
 * Checks pools of sparse blocks, and returns non-zeros and metadata.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function nativeSparse(
  operation: string,
  { nonZeros, metadata }: SparseBlocks,
  dense: MixedBlocks['dense'],
  stream: Stream,
): [nonZeros: NativeTensor, metadata: NativeTensor] {
  const natives = [
    nativeOf(operation, 'nonZeros', nonZeros, stream).native,
    nativeOf(operation, 'metadata', metadata, stream).native,
  ] as const;
  const headDim = dense.shape[2];
  expectDType(operation, 'nonZeros', nonZeros, [dense.dtype]);
  expectDType(operation, 'metadata', metadata, ['u32']);
  expectShape(operation, 'nonZeros', nonZeros, [undefined, sparseBlockElements(headDim)]);
  expectShape(operation, 'metadata', metadata, [nonZeros.shape[0], sparseBlockWords(headDim)]);
  expectContiguous(operation, 'nonZeros', nonZeros);
  expectContiguous(operation, 'metadata', metadata);
  return [...natives];
}

/**
 * Checks the losses of the blocks of a table of this shape.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function nativeBlockLoss(
  operation: string,
  blockLoss: BlockLoss,
  shape: readonly number[],
  stream: Stream,
): NativeTensor {
  const { native } = nativeOf(operation, 'blockLoss', blockLoss, stream);
  expectDType(operation, 'blockLoss', blockLoss, ['f32']);
  expectShape(operation, 'blockLoss', blockLoss, shape);
  expectContiguous(operation, 'blockLoss', blockLoss);
  return native;
}
