import { CapabilityError, DisposedError, InvalidValueError, kvPolicy } from '@kv/sparse-core';
import type { KvDemand } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { goldenModel } from '../testing/golden.js';
import { withRunner } from '../testing/run-model.js';
import { twoMemoryStore, type ToldStore } from '../testing/two-memory-store.js';
import type { Runner } from './runner.js';

async function withTold(
  demand: ((layer: number) => KvDemand | undefined) | undefined,
  use: (runner: Runner, told: ToldStore[]) => void,
): Promise<void> {
  const told: ToldStore[] = [];
  const store = twoMemoryStore(told, { ...(demand && { demand }), most: (layer) => (layer === 1 ? 48 : 64) });
  await withRunner(goldenModel('mistral'), { policy: kvPolicy({ store }), sequences: 2, contextTokens: 64 }, (runner) => {
    use(runner, told);
    return Promise.resolve();
  });
}

describe('a runner tells its stores', () => {
  it('to evict a sequence, in every layer', () =>
    withTold(undefined, (runner, told) => {
      runner.openSequence();
      runner.evict(runner.openSequence());
      expect(told).toEqual([0, 1].map((layer) => ({ layer, method: 'evict', slot: 1 })));
    }));

  it('how many tokens a sequence reads, and a fork as many', () =>
    withTold(undefined, (runner, told) => {
      const all = (slot: number, budgetTokens?: number) => [0, 1].map((layer) => ({ layer, method: 'setBudget', slot, budgetTokens }));
      const sequence = runner.openSequence({ budgetTokens: 48 });
      const fork = runner.fork(sequence);
      expect([sequence.budgetTokens, fork.budgetTokens]).toEqual([48, 48]);
      runner.setBudget(sequence, 32);
      runner.setBudget(sequence, 32);
      runner.setBudget(fork, undefined);
      fork.dispose();
      expect(runner.fork(sequence, { budgetTokens: 16 }).budgetTokens).toBe(16);
      expect(told).toEqual([...all(0, 48), ...all(1, 48), ...all(0, 32), ...all(1), ...all(1, 16)]);
    }));

  it('a budget in all layers or in none', () =>
    withTold(undefined, (runner, told) => {
      const sequence = runner.openSequence({ budgetTokens: 40 });
      for (const budgetTokens of [56, 65, 0, 1.5, NaN]) expect(() => { runner.setBudget(sequence, budgetTokens); }).toThrow(InvalidValueError);
      expect(sequence.budgetTokens).toBe(40);
      expect(told.filter(({ layer }) => layer === 0).map(({ budgetTokens }) => budgetTokens)).toEqual([40, 56, 40]);
      expect(() => runner.openSequence({ budgetTokens: 65 })).toThrow(InvalidValueError);
      expect(() => runner.fork(sequence, { budgetTokens: 65 })).toThrow(InvalidValueError);
      expect(runner.openSequence().slot).toBe(1);
    }));
});

describe('what steps read of the cache', () => {
  it('is the largest working set of a layer, and the loads of all', () =>
    withTold((layer) => ({ step: 9 - layer, workingSet: 5 + layer, hits: 10, misses: 1 + layer }), (runner) => {
      expect(runner.demand(runner.openSequence())).toEqual({ step: 8, workingSet: 6, hits: 20, misses: 3 });
    }));

  it.each([0, 1])('is unknown until layer %d has told too, and every layer is asked', async (unknown) => {
    const asked: number[] = [];
    const demand = (layer: number): KvDemand | undefined => {
      asked.push(layer);
      return layer === unknown ? undefined : { step: 1, workingSet: 1, hits: 1, misses: 0 };
    };
    await withTold(demand, (runner) => {
      expect(runner.demand(runner.openSequence())).toBeUndefined();
    });
    expect(asked).toEqual([0, 1]);
  });
});

it('a store that cannot evict or keep a budget is named', () =>
  withRunner(goldenModel('mistral'), { sequences: 2, contextTokens: 64 }, (runner) => {
    const sequence = runner.openSequence();
    const refused = [
      () => { runner.evict(sequence); },
      () => { runner.setBudget(sequence, 32); },
      () => runner.openSequence({ budgetTokens: 32 }),
    ];
    for (const call of refused) {
      expect(call).toThrow(CapabilityError);
      expect(call).toThrow(/^The store 'dense.*(evict|setBudget)\(\)/);
    }
    expect(runner.demand(sequence)).toBeUndefined();
    // The refused one left its slot.
    runner.openSequence();
    sequence.dispose();
    for (const call of [...refused.slice(0, 2), () => runner.demand(sequence)]) expect(call).toThrow(DisposedError);
    return Promise.resolve();
  }));
