import type { PrefillAttention } from '@kv/sparse-core';

import { verticalSlashBlockScores } from './operations/vertical-slash-block-scores.js';
import { scoredPrefill, type ScoredPrefillOptions } from './scored-prefill.js';

/** Rows whose attention is computed exactly. */
const probedRows = 64;
/**
 * How much longer a multiplication takes than one of dense attention. On one H200 the estimate of 131,072 tokens took
 * 10.4 ms in one step and 86 in 16, dense attention 214.
 */
const weightOf = { cpu: 2.5, cuda: 50 } as const;

/**
 * Attention of prompts over the blocks of keys that the largest vertical and slash lines cross, as the last rows of a step
 * see them (MInference). As published, 30 sinks and a diagonal of 100 tokens are the defaults.
 * @throws InvalidValueError for options out of range; its `attend` throws a CapabilityError for a store without dense
 * blocks
 */
export function verticalSlashPrefill(options: ScoredPrefillOptions): PrefillAttention {
  return scoredPrefill(options, {
    subject: 'verticalSlashPrefill',
    label: 'vertical-slash',
    defaults: { sinkTokens: 30, diagonalTokens: 100 },
    score: verticalSlashBlockScores,
    // Twice the products of these rows with all keys.
    cost: (kind, { layer, tokens }) => weightOf[kind] * 2 * probedRows * tokens * layer.headDim * layer.queryHeads,
  });
}
