import type { Device, RopeDescription } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { decompositionCost, isWorthEstimating, mostLost } from './estimated-cost.js';

describe('the cost of the decomposition', () => {
  const rope: RopeDescription = { convention: 'halfSplit', inverseFrequencies: new Float32Array(64), attentionScale: 1 };
  const layer = { index: 0, queryHeads: 32, kvHeads: 8, headDim: 128 };
  /** Whether a prompt of one step is worth it, of which a quarter of the blocks is computed; `most` as in isWorthEstimating. */
  const isWorth = (kind: Device['kind'], tokens: number, most?: number) => {
    const step = { layer, rows: tokens, tokens, rope, exactTokens: 101, share: 0.25 };
    return isWorthEstimating(step, decompositionCost(kind, step, 10_240), most);
  };

  it('lets a GPU estimate prompts from 12K tokens on if a budget says how many blocks are left', () => {
    expect([4096, 8192, 12_288, 16_384, 131_072].map((tokens) => isWorth('cuda', tokens))).toEqual([false, false, true, true, true]);
  });

  it('keeps prompts dense of which flat attention would lose more than a tenth, if nothing says so', () => {
    const worth = (tokens: number) => isWorth('cuda', tokens, mostLost.cuda);
    expect([12_288, 16_384, 32_768, 131_072].map(worth)).toEqual([false, false, true, true]);
    expect(isWorth('cpu', 4096, mostLost.cpu)).toBe(true);
  });
});
