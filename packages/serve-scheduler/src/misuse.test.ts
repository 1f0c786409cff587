import { createDevice } from '@kv/sparse-core';
import { expectAllTried, legalAt, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import * as exported from './index.js';

const options = { model: { layers: 4, kvHeads: 2, headDim: 64, hiddenSize: 256 }, deviceBlocks: 1000, hostBlocks: 4000 };
const aSize = { promptTokens: 4, maxTokens: 4 };
const scheduler = new exported.Scheduler(options);
const aCount = (paths: string) => legalAt(paths, '2147483647', 'the largest count');

const functions: readonly MisusedFunction[] = [
  {
    name: 'Scheduler',
    args: () => ({ options: { ...options, maxRequests: 4 } }),
    call: (given: { options: exported.SchedulerOptions }) => new exported.Scheduler(given.options),
    legal: [optional('options\\.maxRequests'), aCount('options\\.(model\\.)?\\w+')],
  },
  {
    name: 'Scheduler.submit',
    args: () => ({ size: aSize }),
    call: ({ size }: { size: exported.RequestSize }) => scheduler.submit(size),
  },
  {
    name: 'Scheduler.observe',
    args: () => ({ workingSet: 3 }),
    call: ({ workingSet }: { workingSet: number }) => scheduler.observe(scheduler.submit(aSize), workingSet),
    legal: [aCount('workingSet')],
  },
  {
    name: 'Scheduler.end',
    args: () => ({ request: scheduler.submit(aSize) }),
    call: ({ request }: { request: exported.ScheduledRequest }) => scheduler.end(request),
  },
];

it('covers every export', () => {
  expectAllTried(exported, functions, { 'Scheduler.next': 'takes nothing', createEngine: 'needs a model: engine/engine.test.ts' });
});

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  const suite = new MisuseSuite(createDevice({ threads: 1 }));
  await suite.misuse(subject);
  expect(suite.counts.tries).toBeGreaterThan(6);
  console.log(`misuse of ${subject.name}: ${String(suite.counts)}`);
});
