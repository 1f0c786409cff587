import { describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { halo, hbw, snapKv } from './index.js';
import { selectedTokens } from './testing/prompt-cache.js';
import type { Prompt } from './testing/prompt-cache.js';
import { selectByDefinition } from './testing/select-by-definition.js';

const sizes = { tokens: 700, window: 32, kvHeads: 2, group: 3, dim: 64 };
const prefix = sizes.tokens - sizes.window;
const dtypes = ['f32', 'f16', 'bf16'] as const;

/**
 * A prompt whose last queries see products of 480 with what they look at and of 0 to 333.5 with the prefix, in steps of
 * 1/2: weights from e^-480 to e^-146. All is exact in every dtype. `order` gives each kv head's tokens their steps.
 */
function promptFarBelow(order: readonly Int32Array[], lookedAt: (token: number) => boolean, dtype: Prompt['dtype']): Prompt {
  const { tokens, window, kvHeads, group, dim } = sizes;
  const keyNumbers = new Float64Array(tokens * kvHeads * dim);
  const queryNumbers = new Float64Array(window * kvHeads * group * dim);
  for (let query = 0; query < queryNumbers.length; query += dim) queryNumbers.set([64, 4, 32], query);
  order.forEach((steps, head) => {
    for (let token = 0; token < tokens; token++) {
      const step = token < prefix ? (steps[token] ?? NaN) : 0;
      const key = lookedAt(token) ? [0, 0, 120] : [step >> 4, step & 15, 0];
      keyNumbers.set(key, (token * kvHeads + head) * dim);
    }
  });
  const [keys, queries] = [encode(dtype, keyNumbers), encode(dtype, queryNumbers)];
  return { ...sizes, dtype, keys, queries, keyNumbers, queryNumbers };
}

describeOnDevices('scores too small for f32', ({ open }) => {
  const stream = open().createStream();

  /** Whose steps, in float64, are the scores: of the window's queries every one sees the same. */
  const scoresOf = (steps: Int32Array, lookedAt: (token: number) => boolean) =>
    Array.from(steps, (step, token) => (lookedAt(token) ? 1 : Math.exp(step / 2 - 480)));

  const places: [string, (token: number) => boolean][] = [
    ['the window', (token) => token >= prefix],
    ['one token of the prefix', (token) => token === 77],
  ];
  for (const [place, lookedAt] of places) {
    it.each(dtypes)(`are chosen from in their order beside ${place} that has all the weight, %s`, async (dtype) => {
      const random = new Random(71);
      const order = Array.from({ length: sizes.kvHeads }, () => random.permutation(prefix));
      const prompt = promptFarBelow(order, lookedAt, dtype);
      const row = { prefixTokens: prefix, windowTokens: sizes.window, capacity: 200 };
      const scores = order.map((steps) => scoresOf(steps, lookedAt));
      for (const blockTokens of [1, 6]) {
        const wanted = scores.map((of) => selectByDefinition(of, { ...row, blockTokens }, {}));
        expect(await selectedTokens(stream, prompt, hbw({ capacity: 200, blockTokens }))).toEqual(wanted);
      }
      // Both heads have the same scores in another order, so that budgets that move stay.
      const singles = { blockTokens: 1, rounds: [1] };
      const moved = await selectedTokens(stream, prompt, hbw({ capacity: 200, ...singles, headFloor: 0 }));
      expect(moved).toEqual(scores.map((of) => selectByDefinition(of, { ...row, blockTokens: 1 }, singles)));
    });

    it.each(dtypes)(`are pooled beside ${place} that has all the weight, %s`, async (dtype) => {
      const random = new Random(72);
      const order = Array.from({ length: sizes.kvHeads }, () => random.permutation(prefix));
      const prompt = promptFarBelow(order, lookedAt, dtype);
      for (const kind of ['average', 'max'] as const) {
        const selector = kind === 'max' ? halo({ capacity: 200, window: 32, haloTokens: 5 }) : snapKv({ capacity: 200 });
        const heads = await selectedTokens(stream, prompt, selector);
        heads.forEach((tokens, head) => {
          const scores = scoresOf(order[head] ?? new Int32Array(), lookedAt);
          const pooled = scores.map((_, token) => {
            const near = scores.slice(Math.max(0, token - 2), token + 3);
            return kind === 'max' ? Math.max(...near) : near.reduce((sum, score) => sum + score, 0);
          });
          const chosen = new Set(tokens);
          const worst = Math.min(...pooled.filter((_, token) => chosen.has(token)));
          const others = pooled.filter((_, token) => !chosen.has(token));
          // The products are exact; e^480 leaves an error of 480 roundings, and a small score's step is below 1e-3.
          expect(Math.max(...others)).toBeLessThanOrEqual(worst * (1 + 2e-3));
          expect(chosen.size).toBe(200);
        });
      }
    });
  }
});
