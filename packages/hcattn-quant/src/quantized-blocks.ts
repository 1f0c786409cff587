import { CapabilityError, type TensorHandle } from '@kv/sparse-core';
import { show } from '@kv/sparse-core/native';

/** Tokens of a quantized block, all of one kv head. */
export const blockTokens = 64;

/** Dims of a row that share a scale. */
export const groupDims = 32;

/** Dims of the largest head. */
export const mostDims = 512;

/** Bits of a code. */
export const codeBits = [8, 4, 3, 2] as const;
export type CodeBits = (typeof codeBits)[number];

/** Bits of codes that attention reads. */
const attentionBits = [8, 4] as const satisfies readonly CodeBits[];
export type AttentionBits = (typeof attentionBits)[number];

/** Dims whose codes of 3 or 2 bits lie together. */
const pairDims = 2 * groupDims;

/** @throws CapabilityError for other than 8 or 4 bits */
export function expectAttentionBits(operation: string, bits: Readonly<Record<'keyBits' | 'valueBits', AttentionBits>>): void {
  for (const [subject, given] of Object.entries(bits)) {
    if (attentionBits.includes(given)) continue;
    throw new CapabilityError(`${operation}: ${subject} is ${show(given)}; attention reads codes of ${attentionBits.join(' or ')} bits.`, {
      subject,
      given,
      wanted: attentionBits,
    });
  }
}

/** Quantized blocks of keys, or of values: u8 `[quantizedBlock, byte]`, `quantizedBlockBytes(headDim, bits)` bytes a block. */
export type QuantizedBlocks = TensorHandle<'u8', readonly ['quantizedBlock', 'byte']>;

/**
 * Bytes of 64 tokens of one kv head, keys or values: their codes, and a byte of scale for each 32 dims
 * (`native/shared/quantized-blocks/quantized-blocks.h`).
 * @throws CapabilityError for other than 8, 4, 3 or 2 bits, or 1 to 512 dims
 */
export function quantizedBlockBytes(headDim: number, bits: CodeBits): number {
  if (!codeBits.includes(bits)) {
    throw new CapabilityError(`Codes of ${show(bits)} bits were asked for; there are ${codeBits.join(', ')}.`, {
      subject: 'bits',
      given: bits,
      wanted: codeBits,
    });
  }
  if (!Number.isInteger(headDim) || headDim < 1 || headDim > mostDims) {
    throw new CapabilityError(`headDim is ${show(headDim)}; quantized blocks have heads of 1 to ${mostDims} dims.`, {
      subject: 'headDim',
      given: headDim,
      wanted: mostDims,
    });
  }
  const groups = Math.ceil(headDim / groupDims);
  const dims = bits < 4 ? Math.ceil(headDim / pairDims) * pairDims : groups * groupDims;
  return blockTokens * ((dims * bits) / 8 + groups);
}
