import { describe, expect, it } from 'vitest';

import { serveAll } from '../testing/serve-all.js';
import type { Batch } from './batch.js';
import { Scheduler } from './scheduler.js';
import type { SchedulerOptions } from './scheduler-options.js';

/** A block is 4 tokens of one of 2 heads. Three of each head are pinned; a step reads four others. */
const model = { layers: 3, kvHeads: 2, headDim: 8, hiddenSize: 16 };
const options: SchedulerOptions = {
  model,
  deviceBlocks: 1000,
  hostBlocks: 1000,
  maxRequests: 4,
  maxBatchTokens: 20,
  chunkTokens: 4,
  blockTokens: 4,
  budgetTokens: 28,
  sinkTokens: 4,
  localWindow: 4,
};
const make = (changes: Partial<SchedulerOptions> = {}) => new Scheduler({ ...options, ...changes });
const resident = { sparse: false, layerSegments: false };

/** Each part of a prompt as `arrival: tokens layers`, and each answer as `arrival: token`. */
function show(batch: Batch | undefined): string[] {
  return [
    ...(batch?.answers ?? []).map(({ request, fed }) => `${request.arrival}: ${fed}`),
    ...(batch?.prompts ?? []).map(
      ({ request, firstToken, endToken, firstLayer, endLayer }) =>
        `${request.arrival}: ${firstToken}-${endToken} of ${firstLayer}-${endLayer}`,
    ),
  ];
}

/** Steps on until a batch, or what became of it, is the one that is looked for. */
function stepUntil(scheduler: Scheduler, isDone: (batch: Batch | undefined) => boolean): void {
  for (let step = 0; step < 1000; step++) if (isDone(scheduler.next())) return;
  throw new Error('1,000 steps did not do it');
}

describe('prompts', () => {
  it('are read in layer segments under maxInjectTokens', () => {
    const scheduler = make({ maxInjectTokens: 20 });
    scheduler.submit({ promptTokens: 10, maxTokens: 2 });
    expect(show(scheduler.next())).toEqual(['0: 0-10 of 0-2']);
    expect(show(scheduler.next())).toEqual(['0: 0-10 of 2-3']);
    expect(show(scheduler.next())).toEqual(['0: 0']);
    expect(scheduler.next()).toBeUndefined();
  });

  it('are cut within a layer that is too long', () => {
    const scheduler = make({ maxInjectTokens: 8 });
    scheduler.submit({ promptTokens: 10, maxTokens: 1 });
    const steps = [1, 2, 3, 4, 5, 6].flatMap(() => show(scheduler.next()));
    expect(steps).toEqual(['0: 0-8 of 0-1', '0: 8-10 of 0-1', '0: 0-8 of 1-2', '0: 8-10 of 1-2', '0: 0-8 of 2-3', '0: 8-10 of 2-3']);
  });

  it('are read in chunks that pass all layers', () => {
    const scheduler = make({ features: { layerSegments: false }, maxInjectTokens: 24 });
    scheduler.submit({ promptTokens: 10, maxTokens: 1 });
    expect(show(scheduler.next())).toEqual(['0: 0-8 of 0-3']);
    expect(show(scheduler.next())).toEqual(['0: 8-10 of 0-3']);
  });

  it('of several requests share a step, first come, first served, beside all answers', () => {
    const scheduler = make({ features: { layerSegments: false } });
    for (const promptTokens of [6, 6, 9]) scheduler.submit({ promptTokens, maxTokens: 3 });
    expect(show(scheduler.next())).toEqual(['0: 0-6 of 0-3', '1: 0-6 of 0-3', '2: 0-4 of 0-3']);
    expect(show(scheduler.next())).toEqual(['0: 0', '1: 0', '2: 4-9 of 0-3']);
  });

  it('hold in layer segments what one layer of them takes, and the rows between two layers', () => {
    // 40 tokens are 20 blocks of a layer, their rows as many as 5 blocks of 2 × 4 × 8 numbers, metadata 2 vectors of each block.
    const metadata = Math.ceil((11 * 2 * 2) / 8);
    const scheduler = make();
    scheduler.submit({ promptTokens: 40, maxTokens: 4 });
    scheduler.next();
    expect(scheduler.heldDeviceBlocks).toBe(metadata + Math.ceil((20 + 10) / 3));
    const chunked = make({ features: { layerSegments: false } });
    chunked.submit({ promptTokens: 40, maxTokens: 4 });
    chunked.next();
    expect(chunked.heldDeviceBlocks).toBe(metadata + 20);
  });
});

describe('device memory', () => {
  it('without offload holds whole requests, and the queue waits for its first', () => {
    const scheduler = make({ features: resident, deviceBlocks: 24 });
    // Of 24, 12 and 4 blocks.
    const [first] = [40, 20, 4].map((promptTokens) => scheduler.submit({ promptTokens, maxTokens: 4 }));
    expect(show(scheduler.next())).toEqual(['0: 0-16 of 0-3']);
    expect(scheduler.heldDeviceBlocks).toBe(22);
    if (first) scheduler.end(first);
    expect(show(scheduler.next())).toEqual(['1: 0-16 of 0-3']);
    expect(show(scheduler.next())).toEqual(['1: 16-20 of 0-3', '2: 0-4 of 0-3']);
  });

  it('admits answers by what their last steps read', () => {
    const scheduler = make({ deviceBlocks: 46 });
    const requests = [0, 1].map(() => scheduler.submit({ promptTokens: 40, maxTokens: 20 }));
    stepUntil(scheduler, () => requests.every(({ state }) => state === 'answering'));
    // Metadata of 60 tokens, 8 blocks each, leaves 30; at 41 tokens 16 blocks are not pinned.
    for (const request of requests) scheduler.observe(request, 15);
    expect(scheduler.next()?.answers).toHaveLength(2);
    for (const request of requests) scheduler.observe(request, 16);
    for (const step of [1, 2]) {
      expect(scheduler.next()?.answers.map(({ request }) => request)).toEqual(requests.slice(0, 1));
      expect(requests[1]?.resets).toBe(step);
    }
  });

  it('without working-set control admits all answers, whatever they read', () => {
    const scheduler = make({ deviceBlocks: 46, features: { workingSetControl: false } });
    const requests = [0, 1, 2, 3].map(() => scheduler.submit({ promptTokens: 40, maxTokens: 20 }));
    stepUntil(scheduler, () => requests.every(({ state }) => state === 'answering'));
    // Metadata of all leaves 14 blocks, and a step of each reads 8.
    for (const request of requests) scheduler.observe(request, 30);
    expect(scheduler.next()?.answers).toHaveLength(4);
    expect(requests.map(({ resets }) => resets)).toEqual([0, 0, 0, 0]);
  });

  it('goes to who was left out 64 times first', () => {
    const scheduler = make({ deviceBlocks: 88 });
    const requests = [0, 1].map(() => scheduler.submit({ promptTokens: 40, maxTokens: 200 }));
    stepUntil(scheduler, () => requests.every(({ state }) => state === 'answering'));
    for (const request of requests) scheduler.observe(request, 16);
    const served = Array.from({ length: 66 }, () => scheduler.next()?.answers.map(({ request }) => request.arrival));
    expect(served).toEqual([...Array.from({ length: 64 }, () => [0]), [1], [1]]);
  });

  it('lowers the budget of who does not fit alone, and only then', () => {
    const scheduler = make({ deviceBlocks: 18, budgetTokens: 60 });
    const request = scheduler.submit({ promptTokens: 24, maxTokens: 40 });
    const budgets: number[] = [];
    stepUntil(scheduler, (batch) => {
      budgets.push(...(batch?.answers ?? []).map(({ budgetTokens }) => budgetTokens));
      return request.state === 'answered';
    });
    // Beside metadata 10 blocks are left: 5 of a head and 3 pinned ones, 32 tokens.
    expect(budgets).toEqual([...Array.from({ length: 8 }, () => 60), ...Array.from({ length: 31 }, () => 32)]);
  });

  it('leaves the budget of who fits alone as it is, also behind the last token of another', () => {
    const scheduler = make({ deviceBlocks: 70 });
    const requests = [200, 100].map((maxTokens) => scheduler.submit({ promptTokens: 40, maxTokens }));
    stepUntil(scheduler, () => requests.every(({ state }) => state === 'answering'));
    for (const request of requests) scheduler.observe(request, 16);
    const budgets: number[] = [];
    stepUntil(scheduler, (batch) => {
      budgets.push(...(batch?.answers ?? []).map(({ budgetTokens }) => budgetTokens));
      return requests.every(({ state }) => state === 'answered');
    });
    expect(requests.map(({ resets }) => resets >= 64)).toEqual([true, true]);
    expect(budgets.every((budget) => budget === 28)).toBe(true);
  });
});

describe('host memory', () => {
  const full: Partial<SchedulerOptions> = { hostBlocks: 24, reservedAnswerTokens: 0 };

  it('that answers outgrow is taken from the least computed request, which is read and answered again', () => {
    const scheduler = make(full);
    const requests = [16, 12].map((promptTokens) => scheduler.submit({ promptTokens, maxTokens: 24 }));
    const replayed: number[] = [];
    const restarted: number[] = [];
    stepUntil(scheduler, (batch) => {
      restarted.push(...(batch?.restarted ?? []).map(({ arrival }) => arrival));
      for (const { request, fed, isReplay } of batch?.answers ?? []) if (isReplay && request.arrival === 1) replayed.push(fed);
      for (const request of requests) if (request.state === 'answered') scheduler.end(request);
      return requests.every(({ state }) => state === 'ended');
    });
    expect(restarted).toEqual([1]);
    // All but the last of the tokens that it had.
    expect(replayed.length).toBeGreaterThan(5);
    expect(replayed).toEqual(replayed.map((_, index) => index));
    expect(scheduler.heldHostBlocks).toBe(0);
  });

  it('is promised for whole answers by default', () => {
    const scheduler = make({ hostBlocks: 24 });
    const requests = [16, 12].map((promptTokens) => scheduler.submit({ promptTokens, maxTokens: 24 }));
    const checker = serveAll(scheduler, requests);
    expect(checker.restarts).toBe(0);
    // One behind the other: a prompt, an answer of 24 tokens, and the step in which it ends.
    expect(checker.steps).toBe(48);
  });
});

it('gives back all memory of a request that is ended at any time', () => {
  for (let steps = 0; steps < 12; steps++) {
    const scheduler = make();
    const requests = [20, 9, 14].map((promptTokens) => scheduler.submit({ promptTokens, maxTokens: 5 }));
    for (let step = 0; step < steps; step++) scheduler.next();
    for (const request of requests) scheduler.end(request);
    for (const request of requests) scheduler.end(request);
    expect([scheduler.heldDeviceBlocks, scheduler.heldHostBlocks, scheduler.underWay, scheduler.waiting]).toEqual([0, 0, 0, 0]);
    expect(scheduler.next()).toBeUndefined();
  }
});
