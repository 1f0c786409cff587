import { PassThrough } from 'node:stream';

import { createDevice } from '@kv/sparse-core';
import { expectAllTried, legalAt, type MisusedFunction, MisuseSuite, optional } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import type { CliStreams } from './command-context.js';
import * as exported from './index.js';
import { needleModel, runKv, temporaryFile } from './testing/run-kv.js';

const functions: readonly MisusedFunction[] = [
  {
    name: 'runCli',
    args: () => ({ args: ['--version'], streams: { stdout: new PassThrough(), stderr: new PassThrough() } }),
    call: async ({ args, streams }: { args: string[]; streams: CliStreams }) => {
      await exported.runCli(args, streams);
    },
    legal: [
      legalAt('args', 'one entry (more|fewer)', 'whatever commander takes'),
      legalAt('args\\.0', "'.*'", 'what is no command is written to stderr'),
      optional('streams'),
      legalAt('streams\\.std\\w+', 'a proxy', 'it stands for the stream behind it'),
    ],
  },
];

it('covers every export', () => {
  expectAllTried(exported, functions, {});
});

it.each(functions)('misuse of $name ends in a typed error, and changes nothing', async (subject) => {
  const suite = new MisuseSuite(createDevice({ threads: 1 }));
  await suite.misuse(subject);
  console.log(`misuse of cli: ${String(suite.counts)}`);
});

/** No stack, no defect, nothing that steers a terminal. */
function expectPlain(text: string): void {
  expect(text).not.toMatch(/unexpected error|\n {4}at /);
  expect(text).not.toContain('\u001b');
}

const wrong = ['', 'nonsense', '-1', '0.5', 'NaN', '1e999', '9'.repeat(30), '\u001b[2J'];
const document = await temporaryFile('document.txt', 'The key is 7.');
const questions = await temporaryFile('questions.json', '[{ "question": "Key?", "answer": "7" }]');
const commands: Record<string, readonly string[]> = {
  generate: ['--prompt', 'a', '--max-new-tokens', '1', '--threads', '1'],
  compare: ['--document', document, '--questions', questions, '--max-new-tokens', '1', '--threads', '1'],
  bench: ['--policy', 'dense', '--requests', '1', '--prompt-tokens', '4', '--answer-tokens', '1', '--threads', '1'],
  // Of too few tokens to be trained on.
  calibrate: ['--text', document, '--out', await temporaryFile('codebooks', ''), '--threads', '1'],
  simulate: ['--figure', '4', '--requests', '1'],
};
const optionsOf = {
  generate: ['device', 'max-new-tokens', 'min-p', 'policy', 'prompt-file', 'repetition-penalty', 'seed', 'temperature', 'threads', 'top-k', 'top-p'],
  compare: ['device', 'document', 'max-new-tokens', 'questions', 'threads'],
  bench: ['answer-tokens', 'budgets', 'device', 'examples', 'policy', 'prompt-tokens', 'requests', 'seed', 'threads'],
  calibrate: ['centroids', 'device', 'groups', 'iterations', 'out', 'seed', 'text', 'threads'],
  simulate: ['answers', 'costs', 'figure', 'gpu', 'model', 'rates', 'requests', 'seed', 'trace'],
};

describe.each(['generate', 'compare', 'bench', 'calibrate', 'simulate'] as const)('kv %s', (command) => {
  const models = command === 'simulate' ? [] : [needleModel];
  const right = (option: string): string[] => {
    const options = [...(commands[command] ?? [])];
    const place = options.indexOf(`--${option}`);
    if (place !== -1) options.splice(place, 2);
    if (option === 'prompt-file') options.splice(options.indexOf('--prompt'), 2);
    if (option === 'trace') options.splice(options.indexOf('--figure'), 2);
    return options;
  };

  it.each(optionsOf[command])('answers every wrong --%s in one line, or takes it', async (option) => {
    for (const value of wrong) {
      const { exitCode, stdout, stderr } = await runKv(command, ...models, ...right(option), `--${option}=${value}`);
      if (exitCode === 0) continue;
      const tried = `--${option}=${value}`;
      expect({ tried, exitCode, stdout }).toEqual({ tried, exitCode: 1, stdout: '' });
      expect(stderr, tried).toMatch(/^kv: .*[.?]\n$/);
      expectPlain(stderr);
    }
  });

  it.skipIf(models.length === 0).each(wrong)('refuses the model %j', async (model) => {
    const { exitCode, stderr } = await runKv(command, ...(commands[command] ?? []), '--', model);
    expect(exitCode).toBe(1);
    expectPlain(stderr);
  });
});
