import { ShapeError } from '@kv/sparse-core';
import type { FloatDType, PagedRows, TensorHandle } from '@kv/sparse-core';
import { expectHeads, expectThat, floats, isFinite32, pagedRowRules } from '@kv/sparse-core/native';

/** The batch has one entry, whose rows are the last of its sequence; every kv head holds all of its keys. */
export interface BlockScoresArguments extends PagedRows {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the cache's kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** Products are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /**
   * f32 `[queryHead, queryTile, keyBlock]`, contiguous, of tiles of 128 rows and blocks of 64 keys: the natural logarithm
   * of an estimate of which share of the tile's attention falls on the block. Minus infinity for a block that the tile
   * does not see, NaN for one of which nothing is known, because a query or a key is not finite.
   */
  readonly scores: TensorHandle<'f32', readonly ['queryHead', 'queryTile', 'keyBlock']>;
}

/** In the order of `native/bindings/prefill-block-scores.h`. */
export const blockScoreRules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'scores', dtype: ['f32'], shape: ['queryHead', 'queryTile', 'keyBlock'], layout: 'contiguous' },
  ...pagedRowRules,
] as const;

/**
 * What every estimate of block scores demands of its arguments.
 * @throws ShapeError, InvalidValueError
 */
export function expectBlockScores(
  operation: string,
  { query, slots, scale, blocks }: BlockScoresArguments,
): void {
  expectHeads(operation, query, blocks.keyCounts.shape[1]);
  expectThat(operation, 'scale', scale, isFinite32(scale), 'a finite f32');
  const [entries] = slots.shape;
  if (entries === 1) return;
  throw new ShapeError(`${operation}: slots has ${entries} elements; it must have 1: one batch entry is estimated at a time.`, {
    subject: 'slots',
    given: entries,
    wanted: 1,
  });
}
