import type { PrefillAttention } from '@kv/sparse-core';

import { denseCost } from './estimated-cost.js';
import { clusteredBlockScores } from './operations/clustered-block-scores.js';
import { scoredPrefill, type ScoredPrefillOptions } from './scored-prefill.js';

/**
 * How much longer a multiplication takes than one of dense attention. On one H200 the estimate of 131,072 tokens took
 * 20.3 ms in 16 steps, dense attention 214.
 */
const weightOf = { cpu: 1, cuda: 3 } as const;

/**
 * Attention of prompts over the blocks of keys in which a cluster of keys fits the queries of a tile: our own preset.
 * One sink and a diagonal of 64 tokens are the defaults, and the last 32 rows of a prompt attend to all keys.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function clusteredPrefill(options: ScoredPrefillOptions): PrefillAttention {
  return scoredPrefill(options, {
    subject: 'clusteredPrefill',
    label: 'clustered',
    defaults: { sinkTokens: 1, diagonalTokens: 64, denseLastRows: 32 },
    score: clusteredBlockScores,
    // Half of the rows, an eighth of the keys, and products with keys only, which are half of attention.
    cost: (kind, step) => (weightOf[kind] / 32) * denseCost(step),
  });
}
