import { InvalidValueError } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { halo, hbw } from './index.js';
import { cachePrompt, openStore, randomPrompt } from './testing/prompt-cache.js';
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
  const device = open();
  const stream = device.createStream();

  async function kept(selector: ReturnType<typeof halo>, prompt: Prompt): Promise<number[][]> {
    const store = openStore(device, prompt);
    const call = cachePrompt(stream, store, 0, prompt, 128);
    const selection = await selector.select(stream, call);
    if (selection === undefined) throw new Error('a selection was expected');
    const width = selection.indices.shape[1];
    const indices = await selection.indices.read(stream);
    for (const each of [selection.indices, call.lastQueries, store]) each.dispose();
    return selection.counts.map((count, head) => [...indices.subarray(head * width, head * width + count)]);
  }

  it('keeps what is looked at with as much around it on either side', async () => {
    const heads = await kept(halo({ capacity: 16 + 25 }), promptThatLooksAt([100, 300]));
    expect(heads).toEqual([
      [...range(88, 113), ...range(384, 400)],
      [...range(288, 313), ...range(384, 400)],
    ]);
    const [narrow] = await kept(halo({ capacity: 21, haloTokens: 5 }), promptThatLooksAt([100, 300]));
    expect(narrow).toEqual([...range(98, 103), ...range(384, 400)]);
  });

  it('gives each kv head its share of the capacity', async () => {
    const prompt = randomPrompt(new Random(61), sizes);
    const headShares = [[1.5, 0.255]];
    for (const selector of [halo({ capacity: 100, headShares }), hbw({ keepRatio: 0.25, headShares, window: 16 })]) {
      expect((await kept(selector, prompt)).map((head) => head.length)).toEqual([150, 25]);
    }
    const [equal, other] = await kept(halo({ capacity: 100, headShares: [[1, 1]] }), prompt);
    expect([equal, other]).toEqual(await kept(halo({ capacity: 100 }), prompt));
  });

  it('wants a positive share for every kv head', async () => {
    const prompt = randomPrompt(new Random(62), sizes);
    expect(() => halo({ capacity: 100, headShares: [[1, 0]] })).toThrow(InvalidValueError);
    for (const headShares of [[[1]], []]) {
      await expect(kept(halo({ capacity: 100, headShares }), prompt)).rejects.toThrow(/kv head \d of layer 0/);
    }
  });
});
