import { InvalidValueError, OutOfMemoryError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { Costs } from './costs.js';
import { simulateFigures } from './figures.js';
import { goodput, serviceLevels } from './goodput.js';
import { paperCosts } from './paper-costs.js';
import { simulate } from './simulate.js';
import type { SimulationOptions, SimulationResult } from './simulate.js';
import { simulatedModels, systems } from './systems.js';
import type { SystemFeatures, SystemName } from './systems.js';
import { poissonTrace } from './trace.js';

const model = simulatedModels['lwm-7b'];
const at = (rate: number, requests = 40) => poissonTrace(requests, rate, model, 1);
const scattered = { replaced: 0.9, returning: 0, awaySteps: 1, exponent: 0 };
const run = (system: SystemName, trace: SimulationOptions['trace']) => simulate({ model, features: systems[system], trace });

describe('simulate', () => {
  it('takes the time of its parts for one request', async () => {
    const costs = new Costs();
    const trace = [{ milliseconds: 100, promptTokens: 8192, maxTokens: 3 }];
    const share = model.parameters / costs.measured.parameters;
    const attention = (first: number, end: number) => costs.milliseconds('prefillAttention', (32 * (end ** 2 - first ** 2)) / 2 ** 21);
    const chunk = (first: number) => share * costs.milliseconds('rows', 2048) + 32 * attention(first, first + 2048);
    const chunked = await run('base', trace);
    expect(chunked.firstToken).toBeCloseTo(chunk(0) + chunk(2048) + chunk(4096) + chunk(6144), 6);
    const token = (tokens: number) => share * costs.milliseconds('rows', 1) + 32 * costs.milliseconds('decodeAttention', 32 * tokens);
    expect(chunked.betweenTokens).toBeCloseTo((token(8193) + token(8194)) / 2, 6);
    const segments = await run('+LP', trace);
    const saving = costs.besideSaves * costs.transfer('save', 2 * 2 * 32 * 32 * 128 * 8192);
    expect(segments.firstToken).toBeCloseTo(share * costs.milliseconds('rows', 8192) + 32 * attention(0, 8192) + saving, 6);
    expect([chunked, segments].map(({ requests, queueing }) => [requests, queueing])).toEqual([[1, 0], [1, 0]]);
    const { spent, answersPerStep } = segments;
    expect(spent.prompts).toBeCloseTo(segments.firstToken, 6);
    const { weights, choice, loading } = spent;
    expect(weights + spent.attention + choice + loading).toBeCloseTo(2 * segments.betweenTokens, 6);
    expect(answersPerStep).toBe(1);
  });

  it('loads more where less of what a step reads was read before', async () => {
    const options = { model, features: systems['+LP'], trace: at(0.7, 8) };
    const [local, far] = [await simulate(options), await simulate({ ...options, locality: scattered })];
    expect(far.loadsPerStep).toBeGreaterThan(2 * local.loadsPerStep);
  });

  it('gives the same result for the same seed', async () => {
    const options = { model, features: systems['+LP'], trace: at(2) };
    expect(await simulate(options)).toEqual(await simulate(options));
    expect(await simulate({ ...options, seed: 2 })).not.toEqual(await simulate(options));
  });

  it('serves what all systems can alike, and orders them as the paper does beyond', async () => {
    const names = ['base', '+SA', '+Offload', '+FT', '+WC', '+LP'] as const;
    const all = async (rate: number) => {
      const results: Partial<Record<SystemName, SimulationResult>> = {};
      for (const name of names) results[name] = await run(name, poissonTrace(40, rate, model, 1, 512));
      return results as Record<SystemName, SimulationResult>;
    };
    const low = await all(0.1);
    for (const name of names) expect(low[name].tokensPerSecond / low.base.tokensPerSecond).toBeGreaterThan(0.97);
    const high = await all(1.4);
    expect(high['+SA'].firstToken).toBeLessThan(high.base.firstToken);
    expect(high['+Offload'].tokensPerSecond).toBeLessThan(high['+SA'].tokensPerSecond);
    expect(high['+FT'].loadsPerStep).toBeGreaterThan(high['+WC'].loadsPerStep);
    expect(high['+LP'].firstToken).toBeLessThan(high['+WC'].firstToken);
    expect(high['+LP'].tokensPerSecond).toBeGreaterThan(1.2 * high.base.tokensPerSecond);
    for (const name of names) expect(high[name].requests).toBe(40);
  });

  it('loads a twentieth past the knee with working-set control, and answers no slower than at the knee', async () => {
    const features = { ...systems['+LP'], workingSetControl: false };
    const serve = (rate: number, on: SystemFeatures) => simulate({ model, features: on, trace: poissonTrace(60, rate, model, 1, 512) });
    const [knee, past, without] = [await serve(0.7, systems['+LP']), await serve(1.4, systems['+LP']), await serve(1.4, features)];
    expect(without.loadsPerStep).toBeGreaterThan(20 * past.loadsPerStep);
    expect(past.tokensPerSecond).toBeGreaterThanOrEqual(knee.tokensPerSecond);
    expect(without.tokensPerSecond).toBeLessThan(knee.tokensPerSecond);
  });

  it('refuses what it cannot simulate', async () => {
    const options = { model, features: systems.base, trace: at(1) };
    const wrong: [new (message: string) => Error, object][] = [
      [InvalidValueError, { trace: 3 }],
      [InvalidValueError, { trace: [undefined] }],
      [InvalidValueError, { trace: [{ milliseconds: NaN, promptTokens: 1, maxTokens: 1 }] }],
      [InvalidValueError, { trace: [...at(1, 2)].reverse() }],
      [InvalidValueError, { trace: [{ milliseconds: 0, promptTokens: -1, maxTokens: 1 }] }],
      [InvalidValueError, { model: { ...model, deviceBytes: 0 } }],
      [InvalidValueError, { features: { ...systems.base, offload: true } }],
      [InvalidValueError, { features: { ...systems.base, fastTransfer: 1 } }],
      [InvalidValueError, { costs: {} }],
      [InvalidValueError, { seed: NaN }],
      [InvalidValueError, { locality: { ...scattered, replaced: 0 } }],
      [InvalidValueError, { locality: { ...scattered, exponent: NaN } }],
      [InvalidValueError, { storeBlocks: 40_000 }],
      [InvalidValueError, { features: systems['+LP'], storeBlocks: 0.5 }],
      [InvalidValueError, { signal: 1 }],
      [OutOfMemoryError, { trace: [{ milliseconds: 0, promptTokens: 1e6, maxTokens: 1 }] }],
    ];
    for (const [kind, changes] of wrong) await expect(simulate({ ...options, ...changes })).rejects.toThrow(kind);
    const reason = new Error('enough');
    await expect(simulate({ ...options, signal: AbortSignal.abort(reason) })).rejects.toThrow(reason);
  });
});

it('finds the goodput: the level holds there, and 5 % above it does not', async () => {
  const level = { betweenTokens99: 150, queueing: 500 };
  const of = (rate: number) => run('+SA', at(rate, 30));
  const found = await goodput(of, level);
  const served = async (rate: number) => {
    const { betweenTokens99, queueing } = await of(rate);
    return betweenTokens99 <= level.betweenTokens99 && queueing <= level.queueing;
  };
  expect(found).toBeGreaterThan(0.25);
  expect([await served(found), await served(1.05 * found)]).toEqual([true, false]);
});

it('counts a service level in iterations of the machine, and the wait in seconds or in those too', () => {
  const [own, short] = serviceLevels(model, new Costs());
  const [paper, same] = serviceLevels(model, paperCosts());
  expect([own.queueing, paper.queueing, same]).toEqual([2000, 2000, paper]);
  expect(short.queueing / 2000).toBeCloseTo(own.betweenTokens99 / paper.betweenTokens99, 12);
  expect(own.betweenTokens99 / paper.betweenTokens99).toBeCloseTo(1 / 3, 9);
});

describe('simulateFigures', () => {
  it('gives the tables that were asked for, each marked as simulated', async () => {
    const tables = await simulateFigures(['10', '15', '16a'], { model: 'lwm-7b', requests: 8, rates: [0.5, 2] });
    expect(tables.map(({ figure, gpu }) => [figure, gpu])).toEqual(['10', '15', '16a'].map((figure) => [figure, 'NVIDIA H200']));
    for (const { kinds, columns } of tables) expect(kinds).toEqual(columns.slice(1).map(() => 'simulated'));
    for (const { columns, rows } of tables) {
      expect(rows.map(([rate]) => rate)).toEqual([0.5, 2]);
      for (const row of rows) {
        expect(row).toHaveLength(columns.length);
        expect(row.every((value) => Number.isFinite(value))).toBe(true);
      }
    }
    // Two figures of one run.
    expect(tables[0]?.rows.map((row) => row[4])).toEqual(tables[2]?.rows.map((row) => row[2]));
  });

  it('has a knee by the number of answers, and shows what steps and prompts wait for', async () => {
    const [byBatch, loading, saving, chunks] = await simulateFigures(['1', '14a', '14b', '16b'], { model: 'lwm-7b' });
    const perSecond = byBatch?.rows.map((row) => Number(row[1])) ?? [];
    const best = perSecond.indexOf(Math.max(...perSecond));
    expect([best > 0, best < perSecond.length - 1]).toEqual([true, true]);
    for (const row of loading?.rows ?? []) {
      const [answers, step = NaN, copying = NaN, fastStep = NaN, gathering = NaN] = row.map(Number);
      expect(copying / gathering).toBeCloseTo(new Costs().rate('gather').rate / new Costs().rate('copies').rate, 6);
      // All blocks of two prompts fit, so that half of the steps load nothing.
      if (answers === 2) expect(step).toBeCloseTo(fastStep, 9);
      else expect(step).toBeGreaterThan(fastStep);
    }
    for (const [, copies = NaN, flash = NaN, kernel = NaN] of (saving?.rows ?? []).map((row) => row.map(Number))) {
      expect([copies > flash, kernel > flash, kernel < 1.1 * flash]).toEqual([true, true, true]);
    }
    expect(chunks?.rows.map(([tokens]) => tokens)).toEqual([512, 1024, 2048, 4096]);
    const slower = chunks?.rows.map((row) => Number(row[1])) ?? [];
    expect(slower).toEqual(slower.toSorted((one, other) => other - one));
    for (const row of chunks?.rows ?? []) expect([Number(row[1]) > 1, row[2]]).toEqual([true, 1]);
  });

  it('says what the link is reckoned with, and how blocks overlap', async () => {
    const [link, overlap] = await simulateFigures(['4', '8'], { model: 'lwm-7b' });
    expect([link?.kinds[0], overlap?.kinds]).toEqual(['measured', ['simulated', 'small-model']]);
    expect(link?.rows.map(([, rate]) => rate)).toEqual((['copies', 'gather', 'saveCopies', 'save'] as const).map((name) => new Costs().rate(name).rate));
    const shares = overlap?.rows.map(([, share]) => Number(share)) ?? [];
    expect(shares).toEqual(shares.toSorted((one, other) => one - other));
    expect(Math.abs((shares[4] ?? NaN) - (shares[0] ?? NaN) - 10.68)).toBeLessThan(1);
  });

  it('refuses figures and models that there are not', async () => {
    await expect(simulateFigures(['14' as never], { model: 'lwm-7b' })).rejects.toThrow(InvalidValueError);
    await expect(simulateFigures(['10'], { model: 'gpt-2' as never })).rejects.toThrow(InvalidValueError);
  });
});
