import { readFileSync } from 'node:fs';

import { InvalidValueError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { Costs } from './costs.js';
import { simulateFigures } from './figures.js';
import type { RateName } from './costs.js';
import h200 from './h200-costs.json' with { type: 'json' };
import { storeKernel } from './measured-points.js';
import { paperCosts } from './paper-costs.js';

const benchmarks = new URL('../../../../docs/benchmarks/', import.meta.url);

interface Measured {
  readonly measure: string;
  readonly result: { readonly median: number };
  readonly reference: { readonly median: number };
}

function rowOf(file: string, measure: string): Measured {
  const { rows } = JSON.parse(readFileSync(new URL(file, benchmarks), 'utf8')) as { rows: Measured[] };
  const none = { median: NaN };
  return rows.find((row) => row.measure === measure) ?? { measure, result: none, reference: none };
}

/** The median of a measured row. */
const measured = (file: string, measure: string): number => rowOf(file, measure).result.median;

/** Measured rows that no point of the tables was made of. */
function heldOut(costs: Costs): { name: string; predicted: number; median: number }[] {
  const step = (rows: number, tokens: number) => costs.milliseconds('rows', rows) + 32 * costs.milliseconds('decodeAttention', 8 * tokens);
  const overTwo = (rows: number, tokens: number) =>
    step(rows, rows * 2048) + 32 * (costs.milliseconds('selection', rows * (tokens / 32) * 8) + costs.milliseconds('keeping', rows));
  const prompt = (tokens: number) =>
    (tokens / 8192) * costs.milliseconds('rows', 8192) + 32 * costs.milliseconds('prefillAttention', (32 * tokens ** 2) / 2 ** 21);
  const pairs = (first: number, end: number) => (32 * (end ** 2 - first ** 2)) / 2 ** 21;
  const chunks = (tokens: number, chunk: number) =>
    Array.from({ length: tokens / chunk }, (_, index) => index * chunk)
      .map((first) => costs.milliseconds('rows', chunk) + 32 * costs.milliseconds('prefillAttention', pairs(first, first + chunk)))
      .reduce((sum, each) => sum + each, 0);
  const row = (file: string, measure: string, predicted: number) => ({ name: measure, predicted, median: measured(file, measure) });
  return [
    row('attention-h200.json', 'decode 1x131072', costs.milliseconds('decodeAttention', 8 * 131_072)),
    row('attention-h200.json', 'decode 8x4096', costs.milliseconds('decodeAttention', 8 * 8 * 4096)),
    row('attention-h200.json', 'prefill 8x32768', costs.milliseconds('prefillAttention', 131_072)),
    row('batched-steps-h200.json', 'decode step of 16 sequences of 4096 tokens', step(16, 16 * 4096)),
    row('batched-steps-h200.json', 'decode step of 64 sequences of 4096 tokens', step(64, 64 * 4096)),
    row('batched-steps-h200.json', 'decode step of 63 sequences of 1024 and 1 sequence of 131072 tokens', step(64, 63 * 1024 + 131_072)),
    row('skeleton-model-h200.json', 'each later token, 131072 tokens of prompt, f16', step(1, 131_072)),
    row('skeleton-model-h200.json', 'first token, 131072 tokens of prompt, f16', prompt(131_072)),
    row('serving-h200.json', 'scores, top 64 blocks and plan of a layer, 32 sequences of 32K', costs.milliseconds('selection', 262_144)),
    row('serving-h200.json', 'step of 8 sequences of 32768 tokens, all that it reads on the device', overTwo(8, 32_768)),
    row('serving-h200.json', 'loads of 205 blocks of 2 x 8192 bytes', costs.transfer('gather', 205 * 16_384)),
    row('serving-h200.json', 'loads of 2048 blocks of 2 x 16384 bytes', costs.transfer('gather', 2048 * 32_768)),
    ...[512, 1024, 2048, 4096, 8192].map((chunk) => row('serving-h200.json', `a prompt of 32768 tokens in chunks of ${chunk}`, chunks(32_768, chunk))),
  ];
}

/** Of Fig. 16b ratios count: it was measured at another clock. */
it.each([['lwm-7b', 32], ['llama3-8b', 8]] as const)('says how much longer attention of a prompt of %s takes in chunks, and what was measured', async (model, kvHeads) => {
  const [table] = await simulateFigures(['16b'], { model });
  expect(table?.kinds).toEqual(['simulated', 'simulated', 'measured']);
  for (const [chunk, predicted = NaN, , shown = NaN] of (table?.rows ?? []).map((row) => row.map(Number))) {
    const { result, reference } = rowOf('prompt-chunks-h200.json', `attention of a prompt of 32768 tokens in chunks of ${chunk}, 32/${kvHeads} heads`);
    const share = result.median / reference.median;
    expect(Math.abs(shown - share), `chunks of ${chunk}`).toBeLessThan(0.001);
    if (kvHeads === 32) expect(Math.abs(predicted / share - 1), `chunks of ${chunk}`).toBeLessThan(0.05);
  }
  const [elsewhere] = await simulateFigures(['16b'], { model, costs: paperCosts() });
  expect(elsewhere?.kinds).toEqual(['simulated', 'simulated']);
});

it('has the store kernel of saved prompts as it was measured', () => {
  const { result } = rowOf('serving-h200.json', 'saves of 4096 blocks of 2 x 8192 bytes: a store kernel of 4 thread blocks');
  expect(2 ** 26 / 1e6 / result.median).toBeCloseTo(storeKernel.gigabytesPerSecond, 1);
  const beside = rowOf('serving-h200.json', 'a product of matrices beside saves: a store kernel of 4 thread blocks');
  expect(beside.result.median / 100 - 1).toBeCloseTo(storeKernel.slowed, 3);
});

it('has the overlap of the small model as it was measured', async () => {
  const [table] = await simulateFigures(['8'], { model: 'lwm-7b' });
  for (const [steps, , shown = NaN] of (table?.rows ?? []).map((row) => row.map(Number))) {
    const { result } = rowOf('serving-quality.json', `chosen blocks that one of the ${steps} steps before chose too`);
    expect(Math.abs(shown - result.median), `${steps} steps`).toBeLessThan(0.06);
  }
});

describe('the tables of one H200', () => {
  it('have the numbers of the measured rows that they name', () => {
    const points = Object.values(h200.tables).flatMap((table) => table.points);
    const direct = points.flatMap(({ milliseconds, from }) => {
      const [, file, measure] = /^(\S+\.json): ([^;]+)$/.exec(from) ?? [];
      return file && measure ? [{ milliseconds, from, median: measured(file, measure) }] : [];
    });
    expect(direct.length).toBeGreaterThan(4);
    for (const { milliseconds, from, median } of direct) expect({ from, milliseconds }).toEqual({ from, milliseconds: median });
  });

  it('have of steps what attention leaves of the rows that they name', () => {
    const costs = new Costs();
    const steps = h200.tables.rows.points.flatMap(({ milliseconds, from }) => {
      const [, file, measure, rows] = /^(\S+\.json): (decode step of (\d+) sequences? of 4096 tokens); less its attention$/.exec(from) ?? [];
      return file && measure ? [{ whole: milliseconds + 32 * costs.milliseconds('decodeAttention', 8 * 4096 * Number(rows)), median: measured(file, measure) }] : [];
    });
    expect(steps).toHaveLength(4);
    for (const { whole, median } of steps) expect(Math.abs(whole / median - 1)).toBeLessThan(0.01);
  });

  it('predict what they were not made of within 5 %', () => {
    const held = heldOut(new Costs());
    for (const { name, predicted, median } of held) {
      console.log(`${name}: ${predicted.toPrecision(4)} ms predicted, ${median} ms measured (${(100 * (predicted / median - 1)).toFixed(1)} %)`);
      expect(Math.abs(predicted / median - 1), name).toBeLessThan(0.05);
    }
    expect(held.length).toBeGreaterThan(7);
  });

  it('are linear between points, and go on behind the last', () => {
    const costs = new Costs();
    const { points } = h200.tables.rows;
    const [first = NaN, eight = NaN, many = NaN] = points.map(({ milliseconds }) => milliseconds);
    const [last = NaN, before = NaN] = points.map(({ milliseconds }) => milliseconds).reverse();
    expect([costs.milliseconds('rows', 1), costs.milliseconds('rows', 0.5)]).toEqual([first, first]);
    expect(costs.milliseconds('rows', 20)).toBeCloseTo((eight + many) / 2, 12);
    expect(costs.milliseconds('rows', 8192 + 7168)).toBeCloseTo(last + (last - before), 12);
    expect(costs.transfer('gather', 50e9)).toBeCloseTo(1000, 9);
  });
});

it.each([
  ['no object', 3, 'expected object'],
  ['no GPU', { ...h200, gpu: undefined }, 'gpu'],
  ['another name', { ...h200, more: 1 }, 'more'],
  ['a point of no source', { ...h200, tables: { ...h200.tables, rows: { unit: '', points: [{ at: 1, milliseconds: 1, from: '' }] } } }, 'tables.rows'],
  ['a table that falls', { ...h200, tables: { ...h200.tables, rows: { unit: '', points: [...h200.tables.rows.points].reverse() } } }, "'rows' falls"],
  ['no rate', { ...h200, gigabytesPerSecond: { ...h200.gigabytesPerSecond, gather: { rate: 0, from: 'x' } } }, 'gigabytesPerSecond.gather.rate'],
])('refuses tables with %s', (_name, given, said) => {
  expect(() => new Costs(given)).toThrow(InvalidValueError);
  expect(() => new Costs(given)).toThrow(said);
});

it('refuses tables of another GPU, and takes those of the one that is wanted', () => {
  expect(() => new Costs(h200, 'NVIDIA A100')).toThrow(InvalidValueError);
  expect(() => new Costs(h200, 'NVIDIA A100')).toThrow("are of 'NVIDIA H200'");
  expect(new Costs(h200, 'NVIDIA H200').gpu).toBe('NVIDIA H200');
});

it('has the machine of the paper three times as slow as an H200, with its link as published', () => {
  const [ours, paper] = [new Costs(), paperCosts()];
  expect(paper.milliseconds('decodeAttention', 1e6)).toBeCloseTo(3 * ours.milliseconds('decodeAttention', 1e6), 9);
  expect(paper.milliseconds('rows', 8192) / ours.milliseconds('rows', 8192)).toBeCloseTo(989 / 312, 9);
  const published: [RateName, number][] = [['gather', 20], ['copies', 4], ['save', 23], ['saveCopies', 6]];
  for (const [name, rate] of published) expect(1000 / paper.transfer(name, 1e9), name).toBeCloseTo(rate, 9);
});
