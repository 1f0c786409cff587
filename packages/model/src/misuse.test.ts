import { copyFileSync, mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import * as core from '@kv/sparse-core';
import { aProxiedSignal, expectAllTried, legalAt, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import * as exported from './index.js';
import { ModelBatch } from './runner/model-batch.js';
import { Runner } from './runner/runner.js';
import { Sequence } from './runner/sequence.js';
import { goldenModel } from './testing/golden.js';
import { misusedRunners } from './testing/misused-runners.js';
import { needleModel } from './testing/paths.js';
import { twoMemoryStore } from './testing/two-memory-store.js';

const device = core.createDevice({ threads: 1 });
const directory = goldenModel('mistral');
const model = await exported.Model.open(directory, { device });

const withoutFields = legalAt('options', 'an empty array|an object without prototype', 'no option is given');

const anyText = (paths: string) => legalAt(paths, "'.*'", 'any text');

// What tries share is made, and its recordings too, before anything is counted.
const runner = model.createRunner({ sequences: 8, contextTokens: 64, activations: 'f32', policy: core.kvPolicy({ store: twoMemoryStore() }) });
const base = runner.openSequence();
(await exported.prefill(runner, base, [1, 2, 3, 4, 5, 6, 7, 8])).dispose();
for (const ids of [[5], [6]]) (await runner.step([{ sequence: base, ids, phase: 'decode' }])).dispose();
await runner.stream.synchronize();

const chatDirectory = mkdtempSync(join(tmpdir(), 'kv-misuse-chat-'));
for (const file of ['tokenizer.json', 'tokenizer_config.json']) copyFileSync(join(needleModel, file), join(chatDirectory, file));
writeFileSync(join(chatDirectory, 'chat_template.jinja'), '{{ messages | length }}');
const tokenizer = await exported.Tokenizer.open(chatDirectory);

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
    name: 'StopMatcher',
    args: () => ({ stops: ['ab', 'c'] }),
    call: ({ stops }: { stops: string[] }) => new exported.StopMatcher(stops),
    legal: [legalAt('stops', 'one entry (more|fewer)', 'any number of texts'), legalAt('stops\\.\\d', "'\\w+'", 'any text')],
  },
  {
    name: 'StopMatcher.push',
    args: () => ({ self: new exported.StopMatcher(['ab']), text: 'a' }),
    call: ({ self, text }: { self: exported.StopMatcher; text: string }) => self.push(text),
    legal: [anyText('text')],
  },
  {
    name: 'Tokenizer.open',
    args: () => ({ directory: chatDirectory }),
    call: ({ directory: given }: { directory: string }) => exported.Tokenizer.open(given),
  },
  {
    name: 'Tokenizer.encode',
    args: () => ({ text: 'a text', options: { addSpecialTokens: true, signal: new AbortController().signal } }),
    call: async ({ text, options }: { text: string; options: exported.EncodeOptions }) => {
      await tokenizer.encode(text, options);
    },
    legal: [anyText('text'), optional('options|options\\.\\w+'), withoutFields, aProxiedSignal('options\\.signal')],
  },
  {
    name: 'Tokenizer.decode',
    args: () => ({ ids: [5, 6], options: { skipSpecialTokens: true } }),
    call: ({ ids, options }: { ids: number[]; options: exported.DecodeOptions }) => tokenizer.decode(ids, options),
    legal: [legalAt('ids', 'one entry (more|fewer)', 'any number of tokens'), optional('options|options\\.\\w+'), withoutFields],
  },
  {
    name: 'Tokenizer.stream',
    args: () => ({ preceding: [5, 6], id: 7, options: { skipSpecialTokens: true } }),
    call: ({ preceding, id, options }: { preceding: number[]; id: number; options: exported.DecodeOptions }) =>
      tokenizer.stream(preceding, options).push(id),
    legal: [optional('preceding|options|options\\.\\w+'), legalAt('preceding', 'one entry (more|fewer)', 'any number of tokens'), withoutFields],
  },
  {
    name: 'Tokenizer.tokenId',
    args: () => ({ token: 'a' }),
    call: async ({ token }: { token: string }) => {
      await tokenizer.tokenId(token);
    },
    legal: [anyText('token')],
  },
  {
    name: 'Tokenizer.renderChat',
    args: () => ({
      messages: [{ role: 'user', content: 'Hi' }],
      options: { addGenerationPrompt: true, tools: [], variables: { wanted: true }, signal: new AbortController().signal },
    }),
    call: async ({ messages, options }: { messages: exported.ChatMessage[]; options: exported.ChatTemplateOptions }) => {
      await tokenizer.renderChat(messages, options);
    },
    legal: [
      legalAt('messages', 'one entry (more|fewer)', 'any number of messages'),
      anyText('messages\\.0\\.(role|content)'),
      optional('options|options\\.\\w+(\\.\\w+)?'),
      withoutFields,
      legalAt('options\\.tools', 'one entry more', 'any number of tools'),
      legalAt('options\\.variables', 'an empty array|an object without prototype', 'no variable is given'),
      legalAt('options\\.variables\\.\\w+', '.*', 'whatever the template takes'),
      aProxiedSignal('options\\.signal'),
    ],
  },
  ...misusedRunners({ model, runner, base, tokenizer }),
];

const drives = 'what the runner drives a sequence by';
const untried = {
  Model: 'Model.open() makes it',
  'Model.dispose': 'takes nothing',
  'Model.fingerprint': 'takes nothing',
  'Runner.is': 'says of anything what it is',
  'Runner.assertUsable': 'takes nothing',
  'Runner.dispose': 'takes nothing',
  Runner: 'Model.createRunner() makes it',
  ModelBatch: 'Runner.createBatch() makes it',
  'ModelBatch.assertNext': 'Runner.runLayers asks it',
  'ModelBatch.assertTurn': 'takes nothing',
  'ModelBatch.pass': 'what the runner drives a batch by',
  'ModelBatch.dispose': 'takes nothing',
  Sequence: 'Runner.openSequence() makes it',
  'Sequence.dispose': 'takes nothing',
  'Sequence.assertUsable': 'takes nothing',
  'Sequence.assertWhole': 'takes nothing',
  ...Object.fromEntries(['assertTurn', 'enter', 'leave', 'truncate', 'limit', 'fail'].map((name) => [`Sequence.${name}`, drives])),
  'StopMatcher.end': 'takes nothing',
  withTexts: 'generate() drives it: generate/generate.test.ts',
  Tokenizer: 'Tokenizer.open() makes it',
  'Tokenizer.is': 'says of anything what it is',
  'Tokenizer.dispose': 'takes nothing',
};

it('covers every export', () => {
  const own = Object.entries(exported).filter(([name]) => !(name in core));
  expectAllTried({ ...Object.fromEntries(own), ModelBatch, Runner, Sequence }, functions, untried);
});

const suite = new MisuseSuite(device);

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  await suite.misuse(subject);
});

it('is counted', () => {
  expect(suite.counts.tries).toBeGreaterThan(100);
  console.log(`misuse of model: ${String(suite.counts)}`);
});
