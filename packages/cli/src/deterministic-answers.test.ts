import { hierarchicalHostBytes, hierarchicalStore } from '@kv/hierarchical-kv';
import { Model, prefill } from '@kv/model';
import type { Runner, Sequence } from '@kv/model';
import { createDevice, devices, hostPool, kvPolicy } from '@kv/sparse-core';
import { eventually, Random } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { needleModel } from './testing/run-kv.js';

const [steps, contextTokens, vocabulary] = [8, 640, 4096];
const requests = [500, 40, 610, 300, 560].map((tokens, index) => ({
  prompt: Int32Array.from({ length: tokens }, (_, token) => 3 + ((token * 37 + index * 101) % 4000)),
  // Some read less than the store's budget.
  budgetTokens: [undefined, undefined, 192, 160, undefined][index],
}));

interface Answer {
  readonly sequence: Sequence;
  readonly logits: Float32Array[];
}

async function begin(runner: Runner, { prompt, budgetTokens }: (typeof requests)[number]): Promise<Answer> {
  const sequence = runner.openSequence({ budgetTokens });
  using logits = await prefill(runner, sequence, prompt);
  return { sequence, logits: [await logits.read()] };
}

async function step(runner: Runner, answers: readonly Answer[]): Promise<void> {
  const entries = answers.map(({ sequence, logits }) => ({ sequence, ids: [(logits.length * 977) % vocabulary], phase: 'decode' as const }));
  using logits = await runner.step(entries);
  const all = await logits.read();
  answers.forEach((answer, row) => answer.logits.push(all.slice(row * vocabulary, (row + 1) * vocabulary)));
}

describe.each(['cpu', 'cuda'] as const)('answers on %s', (kind) => {
  it.skipIf(!devices().includes(kind))('with blocks in two memories have the bits of each alone, whatever leaves the device', async () => {
    const device = createDevice({ kind, threads: 2 });
    using model = await Model.open(needleModel, { device });
    const { layers, queryHeads, kvHeads, headDim } = model.config;
    const shapes = Array.from({ length: layers }, (_, index) => ({ index, queryHeads, kvHeads, headDim }));
    const blocks = { budgetTokens: 256, dtype: 'f16' } as const;
    const capacity = { device, slots: requests.length, tokensPerSlot: contextTokens, tokens: requests.length * contextTokens };
    using pool = await hostPool(device, { bytes: hierarchicalHostBytes(blocks, shapes, capacity) });
    const policy = kvPolicy({ store: hierarchicalStore({ ...blocks, deviceBytes: 8_200_000, hostPool: pool }) });
    using runner = model.createRunner({ policy, contextTokens, sequences: requests.length, maxBatchRows: 128, deterministic: true });
    const alone: Float32Array[][] = [];
    for (const request of requests) {
      const answer = await begin(runner, request);
      while (answer.logits.length <= steps) await step(runner, [answer]);
      alone.push(answer.logits);
      answer.sequence.dispose();
    }
    const random = new Random(5);
    const together: Answer[] = [];
    for (const request of requests) together.push(await begin(runner, request));
    for (;;) {
      const waiting = together.filter(({ logits }) => logits.length <= steps);
      if (waiting.length === 0) break;
      if (random.next() < 0.4) runner.evict(random.pick(together).sequence);
      const chosen = new Set([random.pick(waiting), ...waiting.filter(() => random.next() < 0.7)]);
      await step(runner, [...chosen]);
    }
    for (const [index, { sequence, logits }] of together.entries()) {
      expect(logits).toEqual(alone[index]);
      // Asks for it.
      expect(runner.demand(sequence)).toBeUndefined();
    }
    // What is asked for arrives behind a later step.
    for (const answer of together) await step(runner, [answer]);
    const misses = (): number => together.reduce((sum, { sequence }) => sum + (runner.demand(sequence)?.misses ?? 0), 0);
    await eventually(() => misses() > 100);
    expect(misses()).toBeGreaterThan(100);
  });
});
