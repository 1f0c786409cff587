import type { Device, KvLayer, PagedBlocks, Stream, Tensor } from '@kv/sparse-core';
import type { BlockMove, RowsOverBlocks } from './block-codec.js';

/** Blocks of 64 tokens of one kv head, as they are. */
export type DenseKeys = PagedBlocks['keys'];

/** f32: of every row and query head with every key that the row's slot has in codes. */
export type Scores = Tensor<'f32', readonly ['token', 'queryHead', 'key']>;

/** f32: between which scores those of a row and query head are, part by part. */
export type Ranges = Tensor<'f32', readonly ['token', 'queryHead', 'part', 'bound']>;

/** How a layer holds keys on the device where values are on the host. */
export interface KeyCodec {
  /** Enqueues the writing of dense keys as codes. */
  encode(stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]): void;
  /** Enqueues the writing of what codes say to dense keys. */
  decode(stream: Stream, keys: DenseKeys, moves: readonly BlockMove[]): void;
  /** Whether it finds the ranges of scores. */
  readonly findsRanges: boolean;
  /** Enqueues the scores of rows, multiplied by their scale, and their ranges. */
  score(stream: Stream, rows: RowsOverBlocks, scores: Scores, ranges: Ranges | undefined): void;
}

/** What holds the keys of all layers of a cache. */
export interface KeyPool extends Disposable {
  /** Of a block. */
  readonly blockBytes: number;
  /** Of all blocks. */
  readonly byteLength: number;
  /** How a layer, the n-th of the cache, holds them. */
  codecOf(layer: KvLayer, index: number): KeyCodec;
}

/** What keys are on the device. */
export interface KeyFormat {
  /** Behind that of the method. */
  readonly name: string;
  /** @throws OutOfMemoryError; typed errors where the format is not one for these layers */
  createPool(layers: readonly KvLayer[], device: Device, blocks: number): KeyPool;
}
