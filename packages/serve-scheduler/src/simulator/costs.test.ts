import { InvalidValueError } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import { Costs } from './costs.js';
import type { RateName } from './costs.js';
import h200 from './h200-costs.json' with { type: 'json' };
import { paperCosts } from './paper-costs.js';

it('is linear between points, and goes on behind the last', () => {
  const costs = new Costs();
  const { points } = h200.tables.rows;
  const [first = NaN, eight = NaN, many = NaN] = points.map(({ milliseconds }) => milliseconds);
  const [last = NaN, before = NaN] = points.map(({ milliseconds }) => milliseconds).reverse();
  expect([costs.milliseconds('rows', 1), costs.milliseconds('rows', 0.5)]).toEqual([first, first]);
  expect(costs.milliseconds('rows', 20)).toBeCloseTo((eight + many) / 2, 12);
  expect(costs.milliseconds('rows', 8192 + 7168)).toBeCloseTo(last + (last - before), 12);
  expect(costs.transfer('gather', 1e9 * h200.gigabytesPerSecond.gather.rate)).toBeCloseTo(1000, 9);
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
