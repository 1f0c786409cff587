import { type FloatDType, ShapeError, type TensorHandle } from '@kv/sparse-core';
import { batchRules, expectHeads, expectThat, floats } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';

/** Rows of answers, which keys in blocks of codes their slots have, and where their scores go. */
export interface KeyScoresArguments {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** f32 `[token, queryHead, key]`, with room for 64 keys of each block of the table's rows. */
  readonly scores: TensorHandle<'f32', readonly ['token', 'queryHead', 'key']>;
  /** i32: the numbers of each kv head's blocks. */
  readonly blockTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
  /** i32: how many tokens each kv head of each slot has in codes: a multiple of 64. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
  /** Scores are multiplied by this; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
}

/**
 * f32, contiguous: the least and the largest score of each part of a row and head's tokens. Which tokens are in a part is the
 * device's choice, and a part may have none.
 */
export type ScoreRanges = TensorHandle<'f32', readonly ['token', 'queryHead', 'part', 'bound']>;

export const rangesRule = {
  name: 'ranges',
  dtype: ['f32'],
  shape: ['token', 'queryHead', 'part', 2],
  layout: 'contiguous',
  optional: true,
} as const;

/** @throws InvalidValueError for ranges of no parts */
export function expectRanges(operation: string, ranges: ScoreRanges | undefined): void {
  if (ranges !== undefined) expectThat(operation, 'ranges', ranges.shape, ranges.shape[2] > 0, 'of one part or more');
}

/** The first arguments of such an operation, in the order of `native/bindings/key-scores.h`. */
export const scoredRules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'scores', dtype: ['f32'], shape: ['token', 'queryHead', 'key'], layout: 'rows' },
] as const;

/** And the last ones. */
export const tableRules = [
  { name: 'blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' },
  { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  ...batchRules,
] as const;

/**
 * Checks that query heads are a multiple of the kv heads, and that scores have room for all keys of the table.
 * @throws ShapeError
 */
export function expectKeyScores(operation: string, { query, scores, blockTable }: KeyScoresArguments): void {
  const [, kvHeads, blocks] = blockTable.shape;
  expectHeads(operation, query, kvHeads);
  const [given, keys] = [scores.shape[2], blocks * blockTokens];
  if (given >= keys) return;
  throw new ShapeError(`${operation}: scores have ${given} keys; the table's rows have ${keys}: make room for all of them.`, {
    subject: 'scores',
    given,
    wanted: keys,
  });
}
