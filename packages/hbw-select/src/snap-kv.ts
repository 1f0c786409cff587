import type { KvSelector } from '@kv/sparse-core';
import { expectOptions } from '@kv/sparse-core/native';

import type { Capacity } from './capacity.js';
import { attentionSelector } from './hbw.js';
import type { GroupReduction } from './operations/observation-scores.js';
import type { ScorePooling } from './select-options.js';

export interface SnapKvSettings {
  /** The prompt's last tokens: their queries are what is looked at, and they are always kept. Default: 32. */
  readonly window?: number | undefined;
  /** Default: average over 5, as published; its LongBench runs take the maximum over 7. */
  readonly pooling?: ScorePooling | undefined;
  /** Over the query heads that share a kv head. Default: `mean`. */
  readonly groupReduction?: GroupReduction | undefined;
}

const published: ScorePooling = { kind: 'average', tokens: 5 };

/**
 * SnapKV (Li et al. 2024): single tokens by their pooled scores, the window counted in the capacity. Storage is
 * per kv head, so the query heads that share one choose together.
 * @throws InvalidValueError
 */
export function snapKv(options: Capacity & SnapKvSettings): KvSelector {
  expectOptions('snapKv', options, { capacity: true, keepRatio: true, window: true, pooling: true, groupReduction: true });
  const { pooling = published, ...more } = options;
  return attentionSelector('snapkv', { ...more, pooling, rounds: [1], blockTokens: 1 });
}
