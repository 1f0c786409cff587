import { expect, it } from 'vitest';

import { simulateAnchor } from '../testing/anchor-runs.js';
import { measured, readText } from '../testing/measured-rows.js';
import { lineOf, missingLines } from '../testing/page-line.js';
import type { SimulationResult } from './simulate.js';

const trace = readText('packages/serve-scheduler/test-data/anchors.jsonl');

const seeds = [1, 2, 3];
/** What was measured, what the page calls it, by how much it may be off, and where it is in a result. */
const figures = [
  { what: 'tokens', shown: 'tokens/s', most: 0.1, of: ({ tokensPerSecond }: SimulationResult) => tokensPerSecond },
  { what: 'mean time between tokens', shown: 'ms between tokens', most: 0.1, of: ({ betweenTokens }: SimulationResult) => betweenTokens },
  { what: 'time between tokens, P99', shown: 'the same, P99', most: 0.2, of: ({ betweenTokens99 }: SimulationResult) => betweenTokens99 },
  { what: 'mean time to the first token', shown: 'ms to the first token', most: 0.15, of: ({ firstToken }: SimulationResult) => firstToken },
];

it.each([
  ['a dense cache', 'base', 'dense', 'dense cache'],
  ['all features', '+LP', '+LP', 'all features'],
] as const)('says what an engine with %s did on an H200, and the page says how well', async (_what, system, name, onPage) => {
  const runs = await Promise.all(seeds.map((seed) => simulateAnchor(trace, system, 8, seed)));
  const lines = figures.map(({ what, shown, most, of }) => {
    const simulated = runs.map(of).sort((one, other) => one - other)[1] ?? NaN;
    const found = measured('serving-anchors-h200.json', `${name}, 44 requests, 8 times as fast as the trace: ${what}`);
    expect(Math.abs(simulated / found - 1), what).toBeLessThan(most);
    return `${lineOf(`${onPage}: ${shown}`, simulated, found)} | ${100 * most} %`;
  });
  expect(missingLines(lines)).toEqual([]);
});

it('orders the engines as they were measured', async () => {
  const [dense, two] = [await simulateAnchor(trace, 'base', 8, 1), await simulateAnchor(trace, '+LP', 8, 1)];
  expect([dense.tokensPerSecond > two.tokensPerSecond, dense.firstToken < two.firstToken, dense.betweenTokens < two.betweenTokens]).toEqual([true, true, true]);
});
