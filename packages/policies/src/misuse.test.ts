import { expectAllTried, type MisusedFunction, MisuseSuite } from '@kv/sparse-core/testing';
import { createDevice } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import * as exported from './index.js';

const functions: readonly MisusedFunction[] = [
  { name: 'createPolicy', args: () => ({ name: 'hbw-1/4' }), call: ({ name }: { name: string }) => void exported.createPolicy(name) },
];

it('covers every export', () => {
  expectAllTried(exported, functions, {
    openPolicy: 'needs a model: open-policy.test.ts',
    openReading: 'needs a model: open-policy.test.ts',
  });
});

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  const suite = new MisuseSuite(createDevice({ threads: 1 }));
  await suite.misuse(subject);
  expect(suite.counts.tries).toBeGreaterThan(8);
  console.log(`misuse of policies: ${String(suite.counts)}`);
});
