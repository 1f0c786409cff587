import type { FloatDType, KvLayer, Stream, TensorHandle } from '@kv/sparse-core';
import { expectObject, expectThat } from '@kv/sparse-core/native';

/** What a block of keys is scored by. */
export type BlockMetadataMethod = 'mean' | 'minMax' | 'cuboidMean';

/** In the order of `BlockMetadataMethod` in `native/kernels/block-metadata/block-metadata.h`. */
export const blockMetadataMethods: readonly BlockMetadataMethod[] = ['mean', 'minMax', 'cuboidMean'];

/** Full blocks of a layer, of any sequences and kv heads, and where their vectors go. Both are the maker's until the stream is past them. */
export interface BlocksToDescribe {
  readonly layer: KvLayer;
  /** `[block, blockToken, dim]`, contiguous. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** `[block, vector, dim]`, contiguous, of the dtype of `keys`. */
  readonly vectors: TensorHandle<FloatDType, readonly ['block', 'vector', 'dim']>;
}

/** Makes what blocks are scored by, in a way of its own. */
export interface BlockMetadataMaker {
  /** 1: a point p, and a block's score is the largest `q . p`. 2: the ends of a box, whose score is that of `minMax`. */
  readonly vectors: 1 | 2;
  /** Enqueues operations that make all of `vectors` of `keys`, of each block alone, and returns nothing. */
  write(stream: Stream, blocks: BlocksToDescribe): void;
}

export type BlockMetadata = BlockMetadataMethod | BlockMetadataMaker;

/** Vectors of a block's metadata: a point, or the two ends of a box. */
export function metadataVectors(metadata: BlockMetadata): 1 | 2 {
  if (typeof metadata === 'object') return metadata.vectors;
  return metadata === 'mean' ? 1 : 2;
}

/** The operation's method with as many vectors: what a maker writes takes the place of its vectors. */
export function methodOf(metadata: BlockMetadata): BlockMetadataMethod {
  if (typeof metadata === 'string') return metadata;
  return metadata.vectors === 1 ? 'mean' : 'minMax';
}

/** @throws InvalidValueError */
export function expectMetadata(operation: string, metadata: BlockMetadata): void {
  if (typeof metadata !== 'object') {
    expectThat(operation, 'metadata', metadata, blockMetadataMethods.includes(metadata), `${blockMetadataMethods.join(', ')}, or { vectors, write }`);
    return;
  }
  expectObject(operation, 'metadata', metadata);
  const { vectors } = metadata;
  const write: unknown = Reflect.get(metadata, 'write');
  expectThat(operation, 'metadata.vectors', vectors, [1, 2].includes(vectors), '1 or 2');
  expectThat(operation, 'metadata.write', write, typeof write === 'function', 'a function');
}
