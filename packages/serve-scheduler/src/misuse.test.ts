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
  {
    name: 'Scheduler.preempt',
    args: () => ({ request: scheduler.submit(aSize) }),
    call: ({ request }: { request: exported.ScheduledRequest }) => scheduler.preempt(request),
  },
  {
    name: 'readTrace',
    args: () => ({ text: '{"timestamp":0,"input_length":1,"output_length":1}' }),
    call: ({ text }: { text: string }) => exported.readTrace(text),
  },
  {
    name: 'Costs.milliseconds',
    args: () => ({ name: 'rows' as const, at: 3.5 }),
    call: ({ name, at }: { name: 'rows'; at: number }) => new exported.Costs().milliseconds(name, at),
    legal: [legalAt('at', '(0.5|1e\\+300|\\d+)', 'any amount of work')],
  },
  {
    name: 'Costs.rate',
    args: () => ({ name: 'gather' as const }),
    call: ({ name }: { name: 'gather' }) => new exported.Costs().rate(name),
  },
  {
    name: 'Costs.transfer',
    args: () => ({ name: 'gather' as const, bytes: 3.5 }),
    call: ({ name, bytes }: { name: 'gather'; bytes: number }) => new exported.Costs().transfer(name, bytes),
    legal: [legalAt('bytes', '(0.5|1e\\+300|\\d+)', 'any amount')],
  },
];

const elsewhere = 'simulator/simulate.test.ts, costs.test.ts';

it('covers every export', () => {
  expectAllTried(exported, functions, { 'Scheduler.next': 'takes nothing', paperCosts: 'takes nothing', createEngine: 'needs a model: engine/engine.test.ts', simulate: elsewhere, simulateFigures: elsewhere, Costs: elsewhere });
});

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  const suite = new MisuseSuite(createDevice({ threads: 1 }));
  await suite.misuse(subject);
  expect(suite.counts.tries).toBeGreaterThan(6);
  console.log(`misuse of ${subject.name}: ${String(suite.counts)}`);
});
