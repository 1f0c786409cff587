/** What a block of keys is scored by. */
export type BlockMetadataMethod = 'mean' | 'minMax' | 'cuboidMean';

/** In the order of `BlockMetadataMethod` in `native/kernels/block-metadata/block-metadata.h`. */
export const blockMetadataMethods: readonly BlockMetadataMethod[] = ['mean', 'minMax', 'cuboidMean'];

/** Vectors of a block's metadata: a point, or the two ends of a box. */
export function metadataVectors(method: BlockMetadataMethod): 1 | 2 {
  return method === 'mean' ? 1 : 2;
}
