import type { PrefillAttention } from '@kv/sparse-core';
import { expectOptions } from '@kv/sparse-core/native';

import { denseCost } from './estimated-cost.js';
import { antidiagonalBlockScores, type AntidiagonalStride, expectStride } from './operations/antidiagonal-block-scores.js';
import { scoredOptions, scoredPrefill, type ScoredPrefillOptions } from './scored-prefill.js';

export type AntidiagonalPrefillOptions = ScoredPrefillOptions & {
  /** S: elements of an antidiagonal. Default: 8. */
  readonly stride?: AntidiagonalStride | undefined;
};

/**
 * How much longer a multiplication takes than one of dense attention. On one H200 the estimate of 131,072 tokens took
 * 42.1 ms with stride 8 and 19.9 with stride 16, dense attention 214.
 */
const weightOf = { cpu: 1.5, cuda: 3 } as const;

/**
 * Attention of prompts over the blocks of keys with the largest sums along antidiagonals (XAttention). As published,
 * 128 sinks and a diagonal of 1 token are the defaults.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function antidiagonalPrefill(options: AntidiagonalPrefillOptions): PrefillAttention {
  expectOptions('antidiagonalPrefill', options, { ...scoredOptions, stride: true });
  const { stride = 8, ...others } = options;
  expectStride('antidiagonalPrefill', stride);
  return scoredPrefill(others, {
    subject: 'antidiagonalPrefill',
    label: 'antidiagonal',
    defaults: { sinkTokens: 128, diagonalTokens: 1 },
    score: (stream, args) => { antidiagonalBlockScores(stream, { ...args, stride }); },
    // 1/S of the products with keys, which are half of attention.
    cost: (kind, step) => (weightOf[kind] / (2 * stride)) * denseCost(step),
  });
}
