import { InvalidValueError, type KvSelector } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { sharedCapacity } from './head-shares.js';
import { halo, hbw } from './index.js';
import { randomPrompt, selectedTokens } from './testing/prompt-cache.js';
import type { Prompt } from './testing/prompt-cache.js';

const sizes = { tokens: 400, window: 16, kvHeads: 2, group: 2, dim: 16 };

/** A prompt whose last queries look at one token of each kv head, and at all others alike. */
function promptThatLooksAt(planted: readonly number[]): Prompt {
  const { tokens, window, kvHeads, group, dim } = sizes;
  const keys = new Float32Array(tokens * kvHeads * dim);
  planted.forEach((token, head) => keys.fill(1, (token * kvHeads + head) * dim, (token * kvHeads + head + 1) * dim));
  const queries = new Float32Array(window * kvHeads * group * dim).fill(1);
  const numbers = { keyNumbers: Float64Array.from(keys), queryNumbers: Float64Array.from(queries) };
  return { ...sizes, dtype: 'f32', keys, queries, ...numbers };
}

const range = (start: number, end: number): number[] => Array.from({ length: end - start }, (_, index) => start + index);

describeOnDevices('halo', ({ open }) => {
  const stream = open().createStream();

  const kept = (selector: KvSelector, prompt: Prompt): Promise<number[][]> => selectedTokens(stream, prompt, selector);

  it('keeps what is looked at with as much around it on either side', async () => {
    const heads = await kept(halo({ capacity: 16 + 25 }), promptThatLooksAt([100, 300]));
    expect(heads).toEqual([
      [...range(88, 113), ...range(384, 400)],
      [...range(288, 313), ...range(384, 400)],
    ]);
    const [narrow] = await kept(halo({ capacity: 21, haloTokens: 5 }), promptThatLooksAt([100, 300]));
    expect(narrow).toEqual([...range(98, 103), ...range(384, 400)]);
  });

  it('moves budgets between kv heads in whole blocks, and keeps as many of all', async () => {
    const prompt = randomPrompt(new Random(61), { ...sizes, tokens: 900 });
    const counts = async (selector: ReturnType<typeof halo>) => (await kept(selector, prompt)).map((head) => head.length);
    // Of eight blocks of 64 tokens a head, and one that is partly filled.
    for (const make of [halo, hbw]) {
      expect(await counts(make({ capacity: 510, window: 16, headShares: [[3, 1]] }))).toEqual([766, 254]);
    }
    expect(await counts(halo({ capacity: 510, headShares: [[5, 5]] }))).toEqual([510, 510]);
    // One block is a head's own.
    expect(await counts(halo({ capacity: 128, headShares: [[1, 0.001]] }))).toEqual([192, 64]);
    expect(await counts(halo({ capacity: 60, headShares: [[9, 1]] }))).toEqual([60, 60]);
  });

  it('keeps as many of all, in tokens and blocks, whatever the shares of the layers', () => {
    const random = new Random(63);
    for (let round = 0; round < 200; round++) {
      const shares = Array.from({ length: random.integer(1, 9) }, () =>
        Array.from({ length: 4 }, () => random.next() ** 3 + 1e-3),
      );
      const [capacity, block] = [random.integer(1, 3000), 64];
      const each = shares.flatMap((heads, layer) =>
        heads.map((_, kvHead) => sharedCapacity(shares, { layer, kvHead }, capacity, block)),
      );
      const sum = (numbers: number[]): number => numbers.reduce((total, number) => total + number, 0);
      expect(sum(each)).toBe(capacity * each.length);
      expect(sum(each.map((tokens) => Math.ceil(tokens / block)))).toBe(Math.ceil(capacity / block) * each.length);
      expect(Math.min(...each)).toBeGreaterThanOrEqual(Math.min(capacity, 1));
      const order = shares.flat();
      each.forEach((tokens, head) => {
        each.forEach((other, another) => {
          if ((order[head] ?? 0) > (order[another] ?? 0)) expect(tokens).toBeGreaterThanOrEqual(other);
        });
      });
    }
  });

  it('wants a positive share for every kv head', async () => {
    const prompt = randomPrompt(new Random(62), sizes);
    expect(() => halo({ capacity: 100, headShares: [[1, 0]] })).toThrow(InvalidValueError);
    for (const headShares of [[[1]], []]) {
      await expect(kept(halo({ capacity: 100, headShares }), prompt)).rejects.toThrow(/kv head \d of layer 0/);
    }
  });
});
