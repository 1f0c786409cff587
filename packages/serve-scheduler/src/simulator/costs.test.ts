import { readFileSync } from 'node:fs';

import { InvalidValueError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { Costs } from './costs.js';
import h200 from './h200-costs.json' with { type: 'json' };

const benchmarks = new URL('../../../../docs/benchmarks/', import.meta.url);

/** The median of a measured row. */
function measured(file: string, measure: string): number {
  const { rows } = JSON.parse(readFileSync(new URL(file, benchmarks), 'utf8')) as { rows: { measure: string; result: { median: number } }[] };
  return rows.find((row) => row.measure === measure)?.result.median ?? NaN;
}

describe('the tables of one H200', () => {
  it('have the numbers of the measured rows that they name', () => {
    const points = Object.values(h200.tables).flatMap((table) => table.points);
    const direct = points.flatMap(({ milliseconds, from }) => {
      const [, file, measure] = /^(\S+\.json): ([^;]+)$/.exec(from) ?? [];
      return file && measure ? [{ milliseconds, from, median: measured(file, measure) }] : [];
    });
    expect(direct.length).toBeGreaterThan(5);
    for (const { milliseconds, from, median } of direct) expect({ from, milliseconds }).toEqual({ from, milliseconds: median });
  });

  it('predict what they were not made of within 5 %', () => {
    const costs = new Costs();
    const step = (rows: number, tokens: number) => costs.milliseconds('rows', rows) + 32 * costs.milliseconds('decodeAttention', 8 * tokens);
    const prompt = (tokens: number) =>
      (tokens / 8192) * costs.milliseconds('rows', 8192) + 32 * costs.milliseconds('prefillAttention', (32 * tokens ** 2) / 2 ** 21);
    const batched = 'decode step of 63 sequences of 1024 and 1 sequence of 131072 tokens';
    const held: [string, number, number][] = [
      [batched, step(64, 63 * 1024 + 131_072), measured('batched-steps-h200.json', batched)],
      ['a token behind 32K', step(1, 32_768), measured('model-h200.json', 'each later token, 32768 tokens of prompt, f16')],
      ['a token behind 128K', step(1, 131_072), measured('skeleton-model-h200.json', 'each later token, 131072 tokens of prompt, f16')],
      ['a prompt of 128K', prompt(131_072), measured('skeleton-model-h200.json', 'first token, 131072 tokens of prompt, f16')],
    ];
    for (const [name, predicted, median] of held) {
      console.log(`${name}: ${predicted.toFixed(2)} ms predicted, ${median.toFixed(2)} ms measured`);
      expect(Math.abs(predicted / median - 1), name).toBeLessThan(0.05);
    }
  });

  it('are linear between points, and go on behind the last', () => {
    const costs = new Costs();
    expect(costs.milliseconds('rows', 1)).toBe(4.116);
    expect(costs.milliseconds('rows', 0.5)).toBe(4.116);
    expect(costs.milliseconds('rows', 12)).toBeCloseTo((4.445 + 4.63) / 2, 12);
    expect(costs.milliseconds('rows', 8192 + 7168)).toBeCloseTo(211.2 + (211.2 - 25.7), 12);
    expect(costs.transfer('gather', 51.2e9)).toBeCloseTo(1000, 9);
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
