import { type FloatDType, InvalidValueError, type Stream, type Tensor, type TensorHandle } from '@kv/sparse-core';
import { expectBoolean, expectIndices, expectShape, expectThat, floats, listFor, listOf, type TensorRule } from '@kv/sparse-core/native';
import { codedBlockBytes, type CodedKeys } from '../coded-keys.js';
import { blockTokens, type CodeBits, quantizedBlockBytes, type QuantizedBlocks } from '../quantized-blocks.js';

/**
 * Keys and values in dense and in quantized blocks. A block of values has the number of its keys. `values`,
 * `quantizedValues` and `valueBits` may be left out together: keys are written alone then.
 */
export interface DenseAndQuantizedBlocks {
  /** `[block, blockToken, dim]`, blocks of 64 tokens of one kv head, 1 to 512 dims. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** The shape, dtype and strides of `keys`. */
  readonly values?: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']> | undefined;
  /** u8 `[quantizedBlock, byte]`, `quantizedBlockBytes(headDim, keyBits)` bytes a block. */
  readonly quantizedKeys: QuantizedBlocks;
  /** As many blocks, of `quantizedBlockBytes(headDim, valueBits)` bytes. */
  readonly quantizedValues?: QuantizedBlocks | undefined;
  /** Bits of a code: 8, 4, 3 or 2. */
  readonly keyBits: CodeBits;
  readonly valueBits?: CodeBits | undefined;
  /** Whether the codes are of rotated rows. What reads them must be told the same. Default: true. */
  readonly rotated?: boolean | undefined;
}

const denseShape = ['block', blockTokens, 'dim'] as const;

export const denseAndQuantizedRules = [
  { name: 'keys', dtype: floats, shape: denseShape, layout: 'rows' },
  { name: 'values', dtypeOf: 'keys', shape: denseShape, layout: 'rows', stridesOf: 'keys', poolWith: 'keys', optional: true },
  { name: 'quantizedKeys', dtype: ['u8'], shape: ['quantizedBlock', 'keyByte'], layout: 'contiguous' },
  { name: 'quantizedValues', dtype: ['u8'], shape: ['quantizedBlock', 'valueByte'], layout: 'contiguous', optional: true },
] as const satisfies readonly TensorRule[];

/**
 * Checks that quantized blocks are as large as heads and bits make them, and that values are given as a whole.
 * @throws CapabilityError, ShapeError, InvalidValueError
 */
export function expectQuantizedBlocks(operation: string, headDim: number, args: DenseAndQuantizedBlocks): void {
  const { values, quantizedKeys, quantizedValues, keyBits, valueBits, rotated } = args;
  expectShape(operation, 'quantizedKeys', quantizedKeys, [undefined, quantizedBlockBytes(headDim, keyBits)]);
  if (rotated !== undefined) expectBoolean(operation, 'rotated', rotated);
  const given = [values, quantizedValues, valueBits].filter((each) => each !== undefined).length;
  expectThat(operation, 'values', values, given === 0 || given === 3, 'given with quantizedValues and valueBits, or left out with both');
  if (quantizedValues === undefined || valueBits === undefined) return;
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
  const { from, to } = expectBlockNumbers(operation, given, blocksRead, blocksWritten);
  return device.tensor('i32', ['end', 'copy'], [2, to.length], Int32Array.from([...from, ...to]));
}

function expectBlockNumbers(operation: string, given: BlockNumbers, blocksRead: number, blocksWritten: number) {
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
  return { from, to };
}

/** Which blocks of keys are read and which are written, and whose they are. */
export interface KeyBlockNumbers extends BlockNumbers {
  /** The kv head of each. */
  readonly kvHeads: ArrayLike<number>;
}

/** Like `blockNumbersOn`, of blocks of `kvHeads` kv heads. */
export function keyBlockNumbersOn(
  operation: string,
  { device }: Stream,
  given: KeyBlockNumbers,
  blocksRead: number,
  blocksWritten: number,
  kvHeads: number,
): Tensor<'i32', readonly ['end', 'copy']> {
  const { from, to } = expectBlockNumbers(operation, given, blocksRead, blocksWritten);
  const heads = listFor(operation, 'kvHeads', given.kvHeads, 'to', to.length);
  expectIndices(operation, 'kvHeads', heads, kvHeads);
  return device.tensor('i32', ['end', 'copy'], [3, to.length], Int32Array.from([...from, ...to, ...heads]));
}

/** What operations over coded keys demand of them, in the order of `native/bindings/coded-keys.h`. */
export const codedKeyRules = [
  { name: 'codedKeys', dtype: ['u8'], shape: ['codedBlock', 'keyByte'], layout: 'contiguous' },
  { name: 'centroids', dtype: ['f16'], shape: ['kvHead', 'book', 'centroid', 'subDim'], layout: 'contiguous' },
  { name: 'channelScale', dtype: ['f32'], shape: ['kvHead', 'dim'], layout: 'contiguous', optional: true },
] as const satisfies readonly TensorRule[];

export const denseKeyRules = [
  { name: 'keys', dtype: floats, shape: denseShape, layout: 'rows' },
  ...codedKeyRules,
] as const satisfies readonly TensorRule[];

/**
 * Checks that codebooks divide heads of so many dims, and that coded blocks are as large as that makes them.
 * @throws CapabilityError, ShapeError, InvalidValueError
 */
export function expectCodedKeys(operation: string, headDim: number, { codedKeys, centroids, codeBits }: CodedKeys): void {
  const [, books, count, subDim] = centroids.shape;
  const groups = headDim / subDim;
  expectThat(operation, 'centroids', centroids.shape, Number.isInteger(groups), `of sub-vectors that divide the ${headDim} dims of a head`);
  expectThat(operation, 'centroids', centroids.shape, books === 1 || books === groups, `one book, or ${groups}, one for each group`);
  expectShape(operation, 'codedKeys', codedKeys, [undefined, codedBlockBytes(groups, codeBits)]);
  expectThat(operation, 'codeBits', codeBits, count <= 2 ** codeBits, `enough to tell ${count} centroids apart`);
}
