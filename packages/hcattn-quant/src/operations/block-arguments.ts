import { type FloatDType, InvalidValueError, type Stream, type Tensor, type TensorHandle } from '@kv/sparse-core';
import { expectIndices, expectShape, floats, listFor, listOf, type TensorRule } from '@kv/sparse-core/native';
import { blockTokens, type CodeBits, quantizedBlockBytes, type QuantizedBlocks } from '../quantized-blocks.js';

/** Keys and values in dense and in quantized blocks. A block of values has the number of its keys. */
export interface DenseAndQuantizedBlocks {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head, 1 to 512 dims. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** The shape, dtype and strides of `keys`. */
  readonly values: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** u8 `[quantizedBlock, byte]`, `quantizedBlockBytes(headDim, keyBits)` bytes a block. */
  readonly quantizedKeys: QuantizedBlocks;
  /** As many blocks, of `quantizedBlockBytes(headDim, valueBits)` bytes. */
  readonly quantizedValues: QuantizedBlocks;
  /** Bits of a code: 8 or 4. */
  readonly keyBits: CodeBits;
  readonly valueBits: CodeBits;
}

const denseShape = ['block', blockTokens, 'dim'] as const;

export const denseAndQuantizedRules = [
  { name: 'keys', dtype: floats, shape: denseShape, layout: 'rows' },
  { name: 'values', dtypeOf: 'keys', shape: denseShape, layout: 'rows', stridesOf: 'keys', poolWith: 'keys' },
  { name: 'quantizedKeys', dtype: ['u8'], shape: ['quantizedBlock', 'keyByte'], layout: 'contiguous' },
  { name: 'quantizedValues', dtype: ['u8'], shape: ['quantizedBlock', 'valueByte'], layout: 'contiguous' },
] as const satisfies readonly TensorRule[];

/**
 * Checks that quantized blocks are as large as heads and bits make them.
 * @throws CapabilityError, ShapeError
 */
export function expectQuantizedBlocks(
  operation: string,
  headDim: number,
  { quantizedKeys, quantizedValues, keyBits, valueBits }: DenseAndQuantizedBlocks,
): void {
  expectShape(operation, 'quantizedKeys', quantizedKeys, [undefined, quantizedBlockBytes(headDim, keyBits)]);
  expectShape(operation, 'quantizedValues', quantizedValues, [undefined, quantizedBlockBytes(headDim, valueBits)]);
}

/** Which blocks are read and which are written: as many, none written twice. */
export interface BlockNumbers {
  readonly from: ArrayLike<number>;
  readonly to: ArrayLike<number>;
}

/**
 * The numbers, checked, as the kernels take them. The caller disposes of the tensor.
 * @throws InvalidValueError, ShapeError
 */
export function blockNumbersOn(
  operation: string,
  { device }: Stream,
  given: BlockNumbers,
  blocksRead: number,
  blocksWritten: number,
): Tensor<'i32', readonly ['end', 'copy']> {
  const to = listOf(operation, 'to', given.to, blocksWritten);
  const from = listFor(operation, 'from', given.from, 'to', to.length);
  expectIndices(operation, 'from', from, blocksRead);
  expectIndices(operation, 'to', to, blocksWritten);
  if (new Set(to).size !== to.length) {
    throw new InvalidValueError(`${operation}: a block of to appears twice; give every one a block of its own.`, {
      subject: 'to',
      given: to,
    });
  }
  return device.tensor('i32', ['end', 'copy'], [2, to.length], Int32Array.from([...from, ...to]));
}
