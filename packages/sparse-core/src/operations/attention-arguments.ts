import type { FloatDType } from '../dtype.js';
import { ShapeError } from '../errors.js';
import type { TensorHandle } from '../handles.js';
import { floats, type TensorRule } from '../tensor-rules.js';
import type { PagedBlocks } from '../paged-blocks.js';
import { describe } from '../tensor.js';
import { expectBoolean, expectThat, isFinite32 } from '../validate.js';

/** Which rows belong to which sequence, and where the sequence's keys and values lie. */
export interface PagedRows {
  readonly blocks: PagedBlocks;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
}

export interface AttentionArguments extends PagedRows {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the cache's kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** The shape of `query`, of any float dtype. */
  readonly output: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** `[token, queryHead]`, contiguous: the natural logarithm of each softmax's denominator. */
  readonly logSumExp?: TensorHandle<'f32', readonly ['token', 'queryHead']> | undefined;
  /** Scores are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /**
   * With causal, query i of an entry's n sees the keys `0 .. keyCount - n + i`; without, all of them. A query
   * that sees no key gives zeros and a `logSumExp` of minus infinity. Default: true.
   */
  readonly causal?: boolean | undefined;
}

/** What operations over paged blocks demand of them. */
export const pagedBlockRules = [
  { name: 'blocks.keys', dtype: floats, shape: ['block', 'blockToken', 'dim'], layout: 'rows' },
  {
    name: 'blocks.values',
    dtypeOf: 'blocks.keys',
    shape: ['block', 'blockToken', 'dim'],
    layout: 'rows',
    stridesOf: 'blocks.keys',
    poolWith: 'blocks.keys',
  },
  { name: 'blocks.blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' },
  { name: 'blocks.keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
] as const satisfies readonly TensorRule[];

/** Of a batch of rows. */
export const batchRules = [
  { name: 'slots', dtype: ['i32'], shape: ['batch'], layout: 'contiguous' },
  { name: 'queryStart', dtype: ['i32'], shape: [{ of: 'batch', plus: 1 }], layout: 'contiguous' },
] as const satisfies readonly TensorRule[];

/** In the order of `native/bindings/paged-batch.h`. */
export const pagedRowRules = [...pagedBlockRules, ...batchRules] as const;

/** Of the rows that attend, in the order of `native/bindings/paged-batch.h`. */
export const attentionRules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'output', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'logSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous', optional: true },
] as const satisfies readonly TensorRule[];

/** @throws ShapeError unless each kv head serves as many query heads */
export function expectHeads(operation: string, query: TensorHandle, kvHeads: number): void {
  const queryHeads = query.shape[1] ?? 0;
  if (queryHeads % kvHeads === 0) return;
  throw new ShapeError(
    `${operation}: query is ${describe(query)} and the cache has ${kvHeads} kv heads; ` +
      'the query heads must be a multiple of them.',
    { subject: 'query', given: queryHeads, wanted: kvHeads },
  );
}

/**
 * What native code takes behind the tensors of attention.
 * @throws InvalidValueError
 */
export function attentionSettings(
  operation: string,
  { scale, causal = true }: Pick<AttentionArguments, 'scale' | 'causal'>,
): readonly [scale: number, causal: boolean] {
  expectThat(operation, 'scale', scale, isFinite32(scale), 'a finite f32');
  expectBoolean(operation, 'causal', causal);
  return [scale, causal];
}
