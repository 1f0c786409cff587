import * as core from '@kv/sparse-core';
import { legalAt, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import * as exported from './index.js';
import { goldenModel } from './testing/golden.js';

const device = core.createDevice({ threads: 1 });
const directory = goldenModel('mistral');
const model = await exported.Model.open(directory, { device });

const withoutFields = legalAt('options', 'an empty array|an object without prototype', 'no option is given');

const functions: readonly MisusedFunction[] = [
  {
    name: 'readModelConfig',
    args: () => ({ directory }),
    call: async (given: { directory: string }) => (await exported.readModelConfig(given.directory)).layers,
  },
  {
    name: 'readStoredTensors',
    args: () => ({ directory }),
    call: async (given: { directory: string }) => (await exported.readStoredTensors(given.directory)).size,
  },
  {
    name: 'Model.open',
    args: () => ({ directory, options: { device } }),
    call: (given: { directory: string; options: exported.ModelOptions }) => exported.Model.open(given.directory, given.options),
    legal: [optional('options|options.device'), withoutFields],
  },
  {
    name: 'Model.createRunner',
    args: () => ({ options: { contextTokens: 64, maxBatchRows: 32, cacheTokens: 100, activations: 'f32' } }),
    call: ({ options }: { options: exported.RunnerOptions }) => model.createRunner(options),
    legal: [optional('options|options\\.\\w+'), withoutFields],
  },
  {
    name: 'StopMatcher',
    args: () => ({ stops: ['ab', 'c'] }),
    call: ({ stops }: { stops: string[] }) => new exported.StopMatcher(stops),
    legal: [legalAt('stops', 'one entry (more|fewer)', 'any number of texts'), legalAt('stops\\.\\d', "'\\w+'", 'any text')],
  },
];

/** What other tests try, and what is of `@kv/sparse-core`, whose own do. */
const elsewhere = {
  generate: 'src/generate/generate.test.ts',
  generateTokens: 'src/generate/generate.test.ts',
  prefill: 'src/runner/given-ids.test.ts',
  ModelBatch: 'src/runner/foreign.test.ts',
  Runner: 'src/runner/foreign.test.ts',
  Sequence: 'src/runner/foreign.test.ts',
  Tokenizer: 'src/tokenizer/tokenizer.test.ts',
  ModelWeights: 'src/weights/check-weights.test.ts',
};

it('covers every export', () => {
  const own = Object.keys(exported).filter((name) => !(name in core));
  const tried = functions.map(({ name }) => name.split('.')[0]);
  expect(own.sort()).toEqual([...new Set([...tried, ...Object.keys(elsewhere)])].sort());
});

const suite = new MisuseSuite(device);

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  await suite.misuse(subject);
});

it('is counted', () => {
  expect(suite.counts.tries).toBeGreaterThan(100);
  console.log(`misuse of model: ${String(suite.counts)}`);
});
