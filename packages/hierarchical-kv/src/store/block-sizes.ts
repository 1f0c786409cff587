import type { FloatDType, KvCapacity, KvLayer } from '@kv/sparse-core';
import type { BlockMetadata } from '../block-metadata-method.js';

/** Consecutive tokens of one kv head in a block. */
export const blockTokens = 32;

/** How many blocks an answer reads, and which of them it always does. */
export interface BlockSizes {
  /** Of a kv head, those of sinks and window included. */
  readonly budgetBlocks: number;
  readonly sinkBlocks: number;
  /** The last blocks: those of the window, and the one that its newest token is in. */
  readonly recentBlocks: number;
  readonly metadata: BlockMetadata;
  /** Whether blocks that come from host memory are compared with checksums. */
  readonly checksums: boolean;
}

/** What a layer's part of a cache follows from. */
export interface LayerSizes extends BlockSizes {
  readonly layer: KvLayer;
  readonly capacity: KvCapacity;
  readonly dtype: FloatDType;
}

/** Blocks of each kv head that hold the longest sequence. */
export function tableWidth({ tokensPerSlot }: KvCapacity): number {
  return Math.ceil(tokensPerSlot / blockTokens);
}

/** Host blocks of a layer. Every sequence may leave one of each kv head partly filled. */
export function hostBlocksOf({ kvHeads }: KvLayer, { tokens, slots }: KvCapacity): number {
  return (Math.ceil(tokens / blockTokens) + slots) * kvHeads;
}

/** Places of a layer that do not pass through its cache. */
export function fixedPlaces({ layer, capacity, sinkBlocks, recentBlocks }: LayerSizes): number {
  return capacity.slots * layer.kvHeads * (sinkBlocks + recentBlocks);
}

/** Blocks of a cache that one kv head reads in a step, with so many tokens. */
export function cachedBlocksRead({ budgetBlocks: most, sinkBlocks, recentBlocks }: BlockSizes, tokens: number, budgetBlocks = most): number {
  const blocks = Math.min(budgetBlocks, Math.ceil(tokens / blockTokens));
  return Math.max(0, blocks - sinkBlocks - recentBlocks);
}

/** Where the block of this number always is, of the places of its kv head. */
export function fixedPlace({ sinkBlocks, recentBlocks }: BlockSizes, block: number): number {
  return block < sinkBlocks ? block : sinkBlocks + (block % recentBlocks);
}

/** Bytes of the keys and values of a block. */
export function blockBytes(headDim: number, elementBytes: number): number {
  return 2 * blockTokens * headDim * elementBytes;
}
