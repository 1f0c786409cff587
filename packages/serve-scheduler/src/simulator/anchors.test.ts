import { readFileSync } from 'node:fs';

import { expect, it } from 'vitest';

import { simulateAnchor } from '../testing/anchor-runs.js';
import type { SimulationResult } from './simulate.js';

const root = new URL('../../../../', import.meta.url);
const read = (path: string): string => readFileSync(new URL(path, root), 'utf8');
const { rows } = JSON.parse(read('docs/benchmarks/serving-anchors-h200.json')) as { rows: { measure: string; result: { median: number } }[] };
const trace = read('packages/serve-scheduler/test-data/anchors.jsonl');

const seeds = [1, 2, 3];
const named = {
  'mean time to the first token': ({ firstToken }: SimulationResult) => firstToken,
  'mean time between tokens': ({ betweenTokens }: SimulationResult) => betweenTokens,
  'time between tokens, P99': ({ betweenTokens99 }: SimulationResult) => betweenTokens99,
  tokens: ({ tokensPerSecond }: SimulationResult) => tokensPerSecond,
};

/** What the simulator says of an engine's run, the median by the seeds of blocks, as a share of what was measured. */
async function heldAgainst(system: 'base' | '+LP', name: string, speed: number): Promise<Record<string, number>> {
  const runs = await Promise.all(seeds.map((seed) => simulateAnchor(trace, system, speed, seed)));
  return Object.fromEntries(
    Object.entries(named).map(([what, of]) => {
      const value = runs.map(of).sort((one, other) => one - other)[1] ?? NaN;
      const measured = rows.find(({ measure }) => measure === `${name}, 44 requests, ${speed} times as fast as the trace: ${what}`)?.result.median ?? NaN;
      console.log(`${name}, ${speed} times as fast, ${what}: ${value.toPrecision(4)} simulated, ${measured} measured (${(100 * (value / measured - 1)).toFixed(1)} %)`);
      return [what, value / measured];
    }),
  );
}

it.each([
  ['a dense cache', 'base', 'dense'],
  ['all features', '+LP', '+LP'],
] as const)('says what an engine with %s did on an H200', async (_what, system, name) => {
  const share = await heldAgainst(system, name, 8);
  for (const [what, most] of [['tokens', 0.1], ['mean time between tokens', 0.1], ['mean time to the first token', 0.15], ['time between tokens, P99', 0.2]] as const) {
    expect(Math.abs((share[what] ?? NaN) - 1), what).toBeLessThan(most);
  }
});

it('orders the engines as they were measured', async () => {
  const [dense, two] = [await simulateAnchor(trace, 'base', 8, 1), await simulateAnchor(trace, '+LP', 8, 1)];
  expect([dense.tokensPerSecond > two.tokensPerSecond, dense.firstToken < two.firstToken, dense.betweenTokens < two.betweenTokens]).toEqual([true, true, true]);
});
