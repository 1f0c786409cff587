import type { Device, FloatDType } from '@kv/sparse-core';
import { type Random, encode } from '@kv/sparse-core/testing';
import { blockTokens, type CodeBits, quantizedBlockBytes } from '../quantized-blocks.js';

export interface BlockSizes {
  readonly dtype: FloatDType;
  readonly headDim: number;
  readonly blocks: number;
  readonly quantizedBlocks: number;
  readonly keyBits: CodeBits;
  readonly valueBits: CodeBits;
}

const denseAxes = ['block', 'blockToken', 'dim'] as const;

/** Pools of blocks; the dense ones hold `keys` and `values`, or zeros, the quantized ones bytes of 0xa5. */
export function testBlocks(device: Device, sizes: BlockSizes, keys?: Float64Array, values?: Float64Array) {
  const { dtype, headDim, blocks, quantizedBlocks, keyBits, valueBits } = sizes;
  const dense = (numbers: ArrayLike<number> = new Float64Array(blocks * blockTokens * headDim)) =>
    device.tensor(dtype, denseAxes, [blocks, blockTokens, headDim], encode(dtype, numbers));
  const quantized = (bits: CodeBits) => {
    const bytes = quantizedBlockBytes(headDim, bits);
    return device.tensor('u8', ['quantizedBlock', 'byte'], [quantizedBlocks, bytes], new Uint8Array(quantizedBlocks * bytes).fill(0xa5));
  };
  return {
    keys: dense(keys),
    values: dense(values),
    quantizedKeys: quantized(keyBits),
    quantizedValues: quantized(valueBits),
    keyBits,
    valueBits,
  };
}

/** Rows like those of a model: normal numbers, and a few dims that are large in all of them. */
export function keyLikeRows(random: Random, blocks: number, headDim: number): Float64Array {
  const offsets = Float64Array.from({ length: headDim }, () => (random.next() < 0.1 ? 20 * random.normal() : 0));
  return Float64Array.from({ length: blocks * blockTokens * headDim }, (_, index) => random.normal() + (offsets[index % headDim] ?? 0));
}
