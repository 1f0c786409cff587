import { createDevice } from '@kv/sparse-core';
import { Model } from '@kv/model';
import { expectAllTried, legalAt, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import * as exported from './index.js';
import { needleModel } from './testing/engine-requests.js';

const options = { model: { layers: 4, kvHeads: 2, headDim: 64, hiddenSize: 256 }, deviceBlocks: 1000, hostBlocks: 4000 };
const aSize = { promptTokens: 4, maxTokens: 4 };
const scheduler = new exported.Scheduler(options);
const model = await Model.open(needleModel, { device: createDevice({ threads: 1 }) });
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
  {
    name: 'createEngine',
    args: () => ({
      options: { sequences: 2, contextTokens: 64, cacheTokens: 128, maxBatchRows: 64, maxInjectTokens: 512, keptPrompts: 1, keptTokens: 64, reservedAnswerTokens: 8, layerSegments: false },
    }),
    call: ({ options: given }: { options: exported.EngineOptions }) => exported.createEngine(model, given).close(),
    legal: [
      optional('options(\\.\\w+)?'),
      legalAt('options', 'an empty array|an object without prototype', 'no option is given'),
      legalAt('options\\.\\w+', '\\d{10,16}', 'of some there may be as many as one wants'),
    ],
  },
  {
    name: 'simulateFigures',
    args: () => ({ names: ['10'], options: { model: 'lwm-7b', requests: 2, answerTokens: 4, seed: 1, rates: [1], costs: new exported.Costs() } }),
    call: ({ names, options: given }: { names: exported.FigureName[]; options: exported.FigureOptions }) => exported.simulateFigures(names, given),
    legal: [
      optional('options\\.(requests|answerTokens|seed|rates|costs)'),
      legalAt('names|options\\.rates', 'one entry (more|fewer)', 'any number of figures and of rates'),
      legalAt('options\\.(seed|rates\\.0)', '(0\\.5|1e\\+300|\\d+)', 'any seed, and any rate'),
    ],
  },
];

const elsewhere = 'simulator/simulate.test.ts, costs.test.ts';

it('covers every export', () => {
  expectAllTried(exported, functions, { 'Scheduler.next': 'takes nothing', paperCosts: 'takes nothing', simulate: elsewhere, Costs: elsewhere, 'Costs.is': 'takes anything' });
});

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  const suite = new MisuseSuite(createDevice({ threads: 1 }));
  await suite.misuse(subject);
  expect(suite.counts.tries).toBeGreaterThan(6);
  console.log(`misuse of ${subject.name}: ${String(suite.counts)}`);
});
