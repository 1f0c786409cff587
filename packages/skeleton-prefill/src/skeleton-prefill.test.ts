import { CapabilityError, createRowBatch, densePrefill, InvalidValueError } from '@kv/sparse-core';
import type { KvStore, PrefillAttention, PrefillCall } from '@kv/sparse-core';
import { describeOnDevices } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import type { DenseReason } from './block-sparse-prefill.js';
import { decompositionStateBytes } from './operations/decompose-attention.js';
import { skeletonPrefill } from './skeleton-prefill.js';
import type { SkeletonPrefillOptions } from './skeleton-prefill.js';
import { logAttention } from './testing/decompose-by-definition.js';
import { decomposeSteps } from './testing/decompose-on-device.js';
import { joined, Layer, layer, type Prompt, rope, rowsOfHeads, scale, type Step, syntheticPrompt } from './testing/prompt-layer.js';
import { blockScores, listsAbove, listsOfBudget, listsOfTileBlocks, thresholdOfEpsilon } from './testing/select-blocks-by-definition.js';

const tooLong: DenseReason = 'the estimate would take longer than it saves';

/** Few samples, so that short prompts are worth estimating on any device. */
const cheap = { sinkTokens: 4, diagonalTokens: 16, samples: 400, denseLastRows: 0 };

const blocks = { ...cheap, tileRows: 128, slashBound: 'safe', denseRows: 0 } as const;

describeOnDevices('skeletonPrefill', ({ name, open }) => {
  // On CUDA only longer prompts are worth an estimate.
  const times = name === 'cuda' ? 10 : 1;
  const tokens = 1500 * times;
  const steps = [600 * times, 1000 * times, tokens];
  const layerOf = (prefill: PrefillAttention) => {
    const device = open();
    return new Layer(device, device.createStream(), prefill);
  };
  const skeleton = (options: SkeletonPrefillOptions) => layerOf(skeletonPrefill({ ...cheap, ...options }));
  const prompt = syntheticPrompt(1, tokens);

  it('computes all for an epsilon that loses nothing, bit for bit as dense attention', async () => {
    const wanted = await layerOf(densePrefill()).read(prompt, [tokens]);
    for (const epsilon of [0, 1e-30]) {
      const given = await skeleton({ epsilon }).read(prompt, [tokens]);
      expect(given.output).toEqual(wanted.output);
      expect(given.reports[0]?.density).toBe(1);
      expect(given.reports[0]?.fallback === undefined).toBe(epsilon > 0);
    }
  });

  /** `[head][tile][block]` of the last step. */
  const scoresOf = async (ends: readonly number[]): Promise<number[][][]> => {
    const device = open();
    const rows = { queries: rowsOfHeads(prompt.query, 4), keys: rowsOfHeads(prompt.keys, 2) };
    const parts = await decomposeSteps(device, device.createStream(), rows, { ...cheap, dtype: 'f32', rope, scale, steps: ends });
    return parts.slash.map((slash, head) => {
      const [vertical, horizontal] = [parts.vertical[head], parts.horizontal[head]];
      if (!vertical || !horizontal) throw new Error('parts of every head');
      return blockScores({ slash, vertical, horizontal }, blocks);
    });
  };

  /** What is computed if tiles take as many blocks as epsilon takes of one that ends there. */
  const densityBehind = (scores: readonly number[][][], { tile, end, epsilon }: { tile: number; end: number; epsilon: number }) => {
    const taken = scores.map((tiles) => listsAbove(tiles.slice(tile, tile + 1), thresholdOfEpsilon(epsilon, end)).flat().length);
    const lists = listsOfTileBlocks(scores, taken.reduce((sum, count) => sum + count, 0), { ...blocks, rows: tokens });
    return lists.flat(2).length / scores.flat(2).length;
  };

  it('computes behind the reference row as many blocks a tile as epsilon takes there', async () => {
    const setting = { epsilon: 30, referenceTokens: 640 * times };
    const { reports } = await skeleton(setting).read(prompt, [tokens]);
    const density = densityBehind(await scoresOf([tokens]), { tile: 5 * times - 1, end: 640 * times, epsilon: 30 });
    expect(density).toBeLessThan(0.7);
    // Of scores in f32 and f64, one block of a head and tile may differ.
    expect(Math.abs((reports[0]?.density ?? NaN) / density - 1)).toBeLessThan(0.02);
    // Up to that row nothing is different.
    const short = await skeleton(setting).read({ ...prompt, tokens: 640 * times }, [640 * times]);
    expect(short).toEqual(await skeleton({ epsilon: 30 }).read({ ...prompt, tokens: 640 * times }, [640 * times]));
  });

  it('keeps the reference between steps and in forks, and takes the first tile where no step had it', async () => {
    const setting = { epsilon: 30, referenceTokens: 800 * times };
    const prefill = skeleton(setting);
    const before = await prefill.read(prompt, steps.slice(0, 2), 1);
    expect(before.reports[1]?.fallback).toBeUndefined();
    const [bytes, plain] = [prefill.state?.bytes().device, decompositionStateBytes({ ...layer, pairs: rope.inverseFrequencies.length })];
    // 4 heads and the tiles of the second step.
    expect(bytes).toBe(plain + 4 * 4 * Math.ceil((400 * times) / 128));
    prefill.fork(1, 2);
    const rest = (slot: number): Step => ({ slot, position: 1000 * times, rows: 500 * times, prompt, ends: true });
    const forked = await prefill.step([rest(2)]);
    const own = await prefill.step([rest(1)]);
    expect(forked).toEqual(own);
    expect(prefill.state?.bytes()).toEqual({ device: 0, host: 0 });
    const again = await skeleton(setting).read(prompt, steps);
    expect(own.output).toEqual(again.output.slice(1000 * times * 4 * 32));
  });

  it('goes by the first tile that is estimated where no step had the reference row', async () => {
    const { reports } = await skeleton({ epsilon: 3, referenceTokens: 2 }).read(prompt, [10, tokens]);
    expect(reports[0]?.fallback).toMatch(/longer than it saves/);
    expect(Math.abs((reports[1]?.density ?? NaN) / densityBehind(await scoresOf([10, tokens]), { tile: 0, end: 138, epsilon: 3 }) - 1)).toBeLessThan(0.02);
  });

  it('computes its budget, and loses no more than the mass of what it leaves out', async () => {
    const { output, reports } = await skeleton({ budget: 0.4 }).read(prompt, [tokens]);
    expect(reports[0]?.fallback).toBeUndefined();
    expect(Math.abs((reports[0]?.density ?? NaN) / 0.4 - 1)).toBeLessThan(0.02);
    const dense = await layerOf(densePrefill()).read(prompt, [tokens]);
    const [queries, keys] = [rowsOfHeads(prompt.query, 4), rowsOfHeads(prompt.keys, 2)];
    const largest = prompt.values.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
    const scores = await scoresOf([tokens]);
    const lists = listsOfBudget(scores, 0.4);
    // Of a long prompt a row here and there.
    const every = times * times;
    const left = queries.map((of, head) => {
      const problem = { queries: of, keys: keys[Math.floor(head / 2)] ?? [], rope, scale };
      return of.map((_, row) => {
        if (row % every !== 0) return NaN;
        const list = new Set(lists[head]?.[Math.floor(row / 128)]);
        return logAttention(problem, row).reduce((sum, x, key) => sum + (list.has(Math.floor(key / 64)) ? 0 : Math.exp(x)), 0);
      });
    });
    expect(Math.max(...left.flat().filter(Number.isFinite))).toBeGreaterThan(0.01);
    output.forEach((x, index) => {
      if (Math.floor(index / 128) % every !== 0) return;
      const mass = left[Math.floor(index / 32) % 4]?.[Math.floor(index / 128)] ?? NaN;
      // Eq. 1 twice: what is left out, and the weights of the rest, which grow by as much. Roundings of f32 besides.
      const most = 2 * mass * largest + 1e-4;
      if (!(Math.abs(x - (dense.output[index] ?? NaN)) <= most)) expect.fail(`element ${index} is off by more than ${most}`);
    });
  });

  it('keeps the last rows of a prompt dense', async () => {
    const dense = await layerOf(densePrefill()).read(prompt, [700 * times, tokens]);
    const given = await skeleton({ budget: 0.3, denseLastRows: 100 }).read(prompt, [700 * times, tokens]);
    expect(given.output.slice(-100 * 4 * 32)).toEqual(dense.output.slice(-100 * 4 * 32));
    expect(given.output).not.toEqual(dense.output);
  });

  it('computes all where no head has a finite estimate, bit for bit as dense attention, and says so', async () => {
    const keys = prompt.keys.slice();
    keys.fill(NaN, 900 * times * 2 * 32, (900 * times + 1) * 2 * 32);
    const given = await skeleton({ budget: 0.3 }).read({ ...prompt, keys }, [tokens]);
    const dense = await layerOf(densePrefill()).read({ ...prompt, keys }, [tokens]);
    expect(given.output).toEqual(dense.output);
    const noEstimate: DenseReason = 'heads had no finite estimate';
    expect(given.reports[0]).toEqual({ density: 1, fallback: noEstimate });
    expect(given.output.subarray(0, 900 * times * 4 * 32).every(Number.isFinite)).toBe(true);
  });

  it('says so of a system without a solution: keys and distances that differ in nothing', async () => {
    const still = { ...rope, inverseFrequencies: new Float32Array(rope.inverseFrequencies.length) };
    const alike = { ...prompt, keys: new Float32Array(prompt.keys.length).fill(0.5) };
    const device = open();
    const reading = new Layer(device, device.createStream(), skeletonPrefill({ ...cheap, budget: 0.3 }), still);
    const { output, reports } = await reading.read(alike, [tokens]);
    expect(reports).toEqual([{ density: 1, fallback: 'heads had no finite estimate' }]);
    expect(output).toEqual((await layerOf(densePrefill()).read(alike, [tokens])).output);
  });

  it.each([1, 19, 20, 21])('reads a prompt of %i tokens, about as many as sinks and diagonal, densely, and says so', async (tokens) => {
    const short = syntheticPrompt(3, tokens);
    const { output, reports } = await skeleton({ budget: 0.3 }).read(short, [tokens]);
    expect(reports).toEqual([{ density: 1, fallback: tooLong }]);
    expect(output).toEqual((await layerOf(densePrefill()).read(short, [tokens])).output);
  });

  it('says so of single heads, and frees what it kept to know it', async () => {
    const keys = prompt.keys.slice();
    keys.fill(NaN, 1400 * times * 2 * 32, (1400 * times * 2 + 1) * 32);
    const prefill = skeleton({ budget: 0.4 });
    const { live } = prefill.device.memory();
    const { reports } = await prefill.read({ ...prompt, keys }, [1000 * times, tokens]);
    expect(reports.map(({ fallback }) => fallback)).toEqual([undefined, 'heads had no finite estimate']);
    expect(reports[1]?.density).toBeLessThan(1);
    expect(prefill.device.memory().live).toBe(live);
  });

  it('does not say so where a row is NaN, or where all is computed by its threshold', async () => {
    const query = prompt.query.slice();
    query.fill(NaN, 1200 * times * 4 * 32, (1200 * times + 1) * 4 * 32);
    for (const options of [{ budget: 0.6 }, { epsilon: 1e-30 }]) {
      expect((await skeleton(options).read({ ...prompt, query }, [tokens])).reports[0]?.fallback).toBeUndefined();
    }
  });

  it('reads a batch as it reads each prompt alone, short ones densely', async () => {
    const other = syntheticPrompt(2, 1200 * times);
    const few = syntheticPrompt(3, 40);
    const whole = (slot: number, of: Prompt): Step => ({ slot, position: 0, rows: of.tokens, prompt: of, ends: true });
    const { output, report } = await skeleton({ budget: 0.4 }).step([whole(0, few), whole(2, prompt), whole(1, other)]);
    const alone = await Promise.all([few, prompt, other].map((of) => skeleton({ budget: 0.4 }).read(of, [of.tokens])));
    expect(output).toEqual(joined(alone.map((each) => each.output)));
    expect(alone[0]?.reports[0]?.fallback).toMatch(/longer than it saves/);
    expect(report.density).toBeLessThan(0.42);
  });

  it('goes on with a forked prompt as with the prompt, and keeps nothing of one that ended', async () => {
    const prefill = skeleton({ budget: 0.4 });
    await prefill.read(prompt, steps.slice(0, 2), 1);
    const { store, state } = prefill;
    expect((state?.bytes().device ?? 0) > 0).toBe(true);
    const rest = (slot: number): Step => ({ slot, position: 1000 * times, rows: 500 * times, prompt, ends: true });
    prefill.fork(1, 2);
    const forked = await prefill.step([rest(2)]);
    const own = await prefill.step([rest(1)]);
    expect(forked.output).toEqual(own.output);
    const again = await skeleton({ budget: 0.4 }).read(prompt, steps);
    expect(own.output).toEqual(again.output.slice(1000 * times * 4 * 32));
    expect(state?.bytes()).toEqual({ device: 0, host: 0 });
    expect(store.lengths(2)).toEqual([tokens, tokens]);
  });

  it('keeps nothing of a prompt whose last step is dense', async () => {
    const prefill = skeleton({ budget: 0.4 });
    const { reports } = await prefill.read(prompt, [tokens - 1, tokens]);
    expect(reports[1]?.fallback).toMatch(/longer than it saves/);
    expect(prefill.state?.bytes()).toEqual({ device: 0, host: 0 });
  });

  it('computes densely what had tokens dropped, and refuses a store without dense blocks', async () => {
    const prefill = skeleton({ budget: 0.4 });
    await prefill.read(prompt, [1000 * times]);
    prefill.keepEverySecond(0, 1000 * times);
    const { report } = await prefill.step([{ slot: 0, position: 1000 * times, rows: 500 * times, prompt, ends: true }]);
    expect(report).toEqual({ density: 1, fallback: 'tokens of the sequence were dropped' });
    const stream = open().createStream();
    const batch = createRowBatch(stream.device, stream, [{ slot: 0, position: 0, rows: 1 }]);
    const blind = { name: 'blind', layer, denseBlocks: () => undefined } as unknown as KvStore;
    const call = { store: blind, batch } as unknown as PrefillCall;
    expect(() => skeletonPrefill({ budget: 0.4 }).attend(stream, call)).toThrow(CapabilityError);
  });

  it('refuses options out of range', () => {
    const wrong = [{}, { budget: 0 }, { budget: 2 }, { epsilon: -1 }, { epsilon: 1, budget: 1 }, { mass: 0.5 }, { budget: 0.5, mass: 0.5 }];
    for (const options of wrong) expect(() => skeletonPrefill(options as SkeletonPrefillOptions)).toThrow(InvalidValueError);
    for (const referenceTokens of [0, 1.5, -1, 2 ** 31]) {
      expect(() => skeletonPrefill({ epsilon: 1, referenceTokens })).toThrow(InvalidValueError);
    }
    for (const settings of [{ referenceTokens: 100 }, { denseLastRows: -1 }, { samples: 0 }, { ridge: 0 }, { sinkTokens: 5000 }, { slashBound: 'mean' }]) {
      expect(() => skeletonPrefill({ budget: 0.1, ...(settings as object) })).toThrow(InvalidValueError);
    }
  });
});
