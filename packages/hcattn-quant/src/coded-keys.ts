import { CapabilityError, type TensorHandle } from '@kv/sparse-core';
import { show } from '@kv/sparse-core/native';
import { blockTokens } from './quantized-blocks.js';

/** The most bits that a code may take: the two bytes of the paper. */
const mostCodeBits = 16;

/** Groups of a quad: a block's groups are filled up to whole quads. */
export const quadGroups = 4;

/** Keys in codes, and what the codes stand for: `key ≈ channelScale * centroid` in each sub-vector. */
export interface CodedKeys {
  /**
   * u8 `[codedBlock, byte]`: blocks of 64 tokens of one kv head, of `codedBlockBytes(groups, codeBits)` bytes. The codes of
   * all blocks come first, then 8 bytes of each block.
   */
  readonly codedKeys: TensorHandle<'u8', readonly ['codedBlock', 'byte']>;
  /** f16 `[kvHead, book, centroid, subDim]`: 2 to 8192 finite centroids; one book of all groups, or one for each. */
  readonly centroids: TensorHandle<'f16', readonly ['kvHead', 'book', 'centroid', 'subDim']>;
  /** f32 `[kvHead, dim]`, above 0; 1 where it is left out. */
  readonly channelScale?: TensorHandle<'f32', readonly ['kvHead', 'dim']> | undefined;
  /** Bits of a code: enough to tell the centroids apart, `codeBitsOf(centroids)`; up to 16. */
  readonly codeBits: number;
}

/** Bytes of a block that say which of its tokens have no codes. */
export const spoiltBytes = 8;

/**
 * Bytes of 64 tokens of one kv head: the codes of their sub-vectors, of which there are `groups` a token, filled up to a
 * multiple of 4, and a bit for each token whose key is not finite (`native/shared/coded-keys/coded-keys.h`).
 * @throws CapabilityError for other than 1 to 16 bits, or less than one group
 */
export function codedBlockBytes(groups: number, codeBits: number): number {
  if (!Number.isInteger(codeBits) || codeBits < 1 || codeBits > mostCodeBits) {
    throw new CapabilityError(`Codes of ${show(codeBits)} bits were asked for; they have 1 to ${mostCodeBits}.`, {
      subject: 'codeBits',
      given: codeBits,
      wanted: mostCodeBits,
    });
  }
  if (!Number.isInteger(groups) || groups < 1) {
    throw new CapabilityError(`Keys of ${show(groups)} groups were asked for; they have one or more.`, {
      subject: 'groups',
      given: groups,
      wanted: 1,
    });
  }
  return (blockTokens * Math.ceil(groups / quadGroups) * quadGroups * codeBits) / 8 + spoiltBytes;
}
