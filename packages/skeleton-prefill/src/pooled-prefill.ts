import type { PrefillAttention } from '@kv/sparse-core';

import { denseCost } from './estimated-cost.js';
import { pooledBlockScores } from './operations/pooled-block-scores.js';
import { scoredPrefill, type ScoredPrefillOptions } from './scored-prefill.js';

/**
 * How much longer a multiplication takes than one of dense attention. On one H200 the estimate of 131,072 tokens took
 * 10.6 ms in 16 steps, dense attention 214.
 */
const weightOf = { cpu: 3, cuda: 6 } as const;

/**
 * Attention of prompts over the blocks of keys whose mean key the queries of a tile look for (FlashPrefill). As
 * published, 256 sinks and a diagonal of 512 tokens are the defaults.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function pooledPrefill(options: ScoredPrefillOptions): PrefillAttention {
  return scoredPrefill(options, {
    subject: 'pooledPrefill',
    label: 'pooled',
    defaults: { sinkTokens: 256, diagonalTokens: 512 },
    score: pooledBlockScores,
    // 1/64 of the products with keys, which are half of attention.
    cost: (kind, step) => (weightOf[kind] / 128) * denseCost(step),
  });
}
