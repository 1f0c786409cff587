import type { Random } from '@kv/sparse-core/testing';
import type { Codebooks, CodebookSizes } from '../codebooks/codebooks.js';

export interface RandomCodebooks extends CodebookSizes {
  readonly layers: number;
  readonly kvHeads: number;
  /** Whether each group has a codebook of its own. */
  readonly separate?: boolean | undefined;
  /** Whether channels have scales other than 1. */
  readonly scaled?: boolean | undefined;
}

export const someFingerprint = '0123456789abcdef'.repeat(4);

/** Codebooks of random centroids, normally distributed. */
export function randomCodebooks(random: Random, sizes: RandomCodebooks): Codebooks {
  const { layers, kvHeads, headDim, groups, centroids, separate = false, scaled = false } = sizes;
  const books = separate ? groups : 1;
  return {
    ...{ model: someFingerprint, headDim, groups, books, centroids },
    layers: Array.from({ length: layers }, () => ({
      kvHeads,
      centroids: random.elements('f16', (kvHeads * books * centroids * headDim) / groups),
      scale: Float32Array.from({ length: kvHeads * headDim }, () => (scaled ? 2 ** random.integer(-2, 2) : 1)),
    })),
    training: { seed: 1, iterations: 200, batchVectors: 10_000, keys: 4096 },
  };
}
