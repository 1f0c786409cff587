import { KvError } from '@kv/sparse-core';
import { Random } from '@kv/sparse-core/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';

import { BatchChecker, observeSome, serveAll } from '../testing/serve-all.js';
import type { ScheduledRequest } from './request.js';
import { Scheduler } from './scheduler.js';

const flag = fc.boolean();
const small = (min: number, max: number) => fc.integer({ min, max });

/** Schedulers of every mixture of features, some so small that requests hardly fit. */
const schedulers = fc
  .record({
    model: fc.record({ layers: small(1, 4), kvHeads: small(1, 3), headDim: fc.constant(8), hiddenSize: small(8, 64) }),
    deviceBlocks: small(20, 400),
    hostBlocks: small(30, 400),
    maxRequests: small(1, 8),
    extraTokens: small(0, 40),
    inject: small(0, 60),
    chunkTokens: small(1, 16),
    blockTokens: small(1, 8),
    extraBudget: small(0, 40),
    sinkTokens: small(0, 8),
    localWindow: small(0, 8),
    reservedAnswerTokens: small(0, 30),
    apart: flag,
    features: fc.tuple(small(0, 3), flag).map(([level, layerSegments]) => ({
      sparse: level > 0,
      offload: level > 1,
      workingSetControl: level > 2,
      layerSegments,
    })),
  })
  .map(({ extraTokens, inject, extraBudget, apart, ...rest }) => {
    const { sinkTokens, localWindow, blockTokens, maxRequests, chunkTokens, model } = rest;
    const least = (Math.ceil(sinkTokens / blockTokens) + Math.ceil(localWindow / blockTokens) + 2) * blockTokens;
    return {
      ...rest,
      promptsApart: apart && rest.features.offload,
      budgetTokens: least + extraBudget,
      maxBatchTokens: maxRequests + chunkTokens + extraTokens,
      maxInjectTokens: chunkTokens * model.layers + inject,
    };
  });

const totals = { operations: 0, steps: 0, preempted: 0, restarts: 0, reused: 0, lowered: 0, refused: 0, served: 0 };

/** What is typed is an answer too. */
function attempt<Result>(work: () => Result): Result | undefined {
  try {
    return work();
  } catch (error) {
    if (!(error instanceof KvError)) throw error;
    totals.refused += 1;
    return undefined;
  }
}

it('keeps its limits, serves everyone and gives all memory back, whatever comes', () => {
  const property = fc.property(schedulers, fc.integer(), (options, seed) => {
    const random = new Random(seed);
    // Others have begun with the same tokens, or not.
    const reuse = ({ promptTokens }: ScheduledRequest): number => {
      const tokens = random.next() < 0.3 ? random.integer(0, promptTokens - 1) : 0;
      totals.reused += tokens;
      return tokens;
    };
    const scheduler = attempt(() => new Scheduler({ ...options, reuse }));
    if (scheduler === undefined) return;
    const checker = new BatchChecker(scheduler);
    const requests: ScheduledRequest[] = [];
    for (let operation = 0; operation < 400; operation++) {
      totals.operations += 1;
      const choice = random.next();
      const open = requests.filter(({ state }) => state !== 'ended');
      if (choice < 0.15 && open.length < 20) {
        const budgetTokens = random.next() < 0.3 ? random.integer(1, options.budgetTokens) : undefined;
        const size = { promptTokens: random.integer(1, 60), maxTokens: random.integer(1, 30), budgetTokens };
        const request = attempt(() => scheduler.submit(size));
        if (request) requests.push(request);
      } else if (choice < 0.18 && open.length > 0) {
        scheduler.end(random.pick(open));
      } else if (choice < 0.2 && open.length > 0) {
        scheduler.preempt(random.pick(open));
        totals.preempted += 1;
      } else {
        const batch = scheduler.next();
        if (batch) checker.check(batch);
        for (const { request } of batch?.answers ?? []) if (random.next() < 0.7) observeSome(scheduler, request, random);
        for (const request of open) if (request.state === 'answered' && random.next() < 0.5) scheduler.end(request);
      }
    }
    const left = requests.filter(({ state }) => state !== 'ended');
    serveAll(scheduler, left, checker, random);
    totals.served += requests.length;
    for (const name of ['steps', 'restarts', 'lowered'] as const) totals[name] += checker[name];
    expect([scheduler.heldDeviceBlocks, scheduler.heldHostBlocks, scheduler.underWay, scheduler.waiting]).toEqual([0, 0, 0, 0]);
  });
  fc.assert(property, { numRuns: Number(process.env.KV_SCHEDULER_RUNS ?? 500), seed: 14 });
  console.log(`random requests: ${JSON.stringify(totals)}`);
  for (const name of ['preempted', 'restarts', 'reused', 'lowered', 'refused', 'served'] as const) expect(totals[name]).toBeGreaterThan(50);
});
