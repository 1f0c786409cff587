import { CapabilityError, type TensorHandle } from '@kv/sparse-core';
import { expectShape, expectThat, show, type TensorRule } from '@kv/sparse-core/native';
import { blockTokens, headDims, type KvOperand, operands, sparseBlockElements, sparseBlockWords, sparseDTypes } from '../blocks-24.js';

/** @throws CapabilityError unless blocks of such heads can be sparse */
export function expectHeadDim(operation: string, headDim: number): void {
  if (headDims.includes(headDim)) return;
  throw new CapabilityError(
    `${operation}: headDim is ${show(headDim)}; blocks can be made sparse with ${headDims.join(' or ')} dims. ` +
      'Use the dense store for this model.',
    { subject: 'headDim', given: headDim, wanted: headDims },
  );
}

/** @throws InvalidValueError unless it is one of the two */
export function expectOperand(operation: string, operand: KvOperand): void {
  expectThat(operation, 'operand', operand, operands.includes(operand), operands.join(' or '));
}

/** What operations demand of a pool of dense blocks. */
export function denseRule<N extends string>(name: N) {
  return { name, dtype: sparseDTypes, shape: ['block', blockTokens, 'dim'], layout: 'contiguous' } as const satisfies TensorRule;
}

/** Of non-zeros and metadata of sparse blocks; `expectSparseBlocks` checks what depends on the head. */
export function sparseRules<N extends string, D extends string>(name: N, dense: D) {
  const block = `${name} block` as const;
  return [
    { name: `${name}.nonZeros`, dtypeOf: dense, shape: [block, 'element'], layout: 'contiguous' },
    { name: `${name}.metadata`, dtype: ['u32'], shape: [block, 'word'], layout: 'contiguous' },
  ] as const satisfies readonly TensorRule[];
}

/** Of the table that says where the blocks of sequences are. */
export function tableRule<N extends string>(name: N) {
  return { name, dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' } as const satisfies TensorRule;
}

/**
 * Checks that sparse blocks are of heads that can be sparse, and as large as theirs are.
 * @throws CapabilityError, ShapeError
 */
export function expectSparseBlocks(operation: string, dense: TensorHandle, nonZeros: TensorHandle, metadata: TensorHandle): void {
  const headDim = dense.shape[2] ?? 0;
  expectHeadDim(operation, headDim);
  expectShape(operation, 'nonZeros', nonZeros, [undefined, sparseBlockElements(headDim)]);
  expectShape(operation, 'metadata', metadata, [undefined, sparseBlockWords(headDim)]);
}
