import { readFile, symlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { PassThrough } from 'node:stream';

import { beforeAll, describe, expect, it } from 'vitest';

import { policies } from '@kv/policies';
import { runCli } from '../run-cli.js';
import { passKey, passKeyFile, passKeyQuestion } from '../testing/pass-key-document.js';
import { needleModel, runKv, temporaryFile } from '../testing/run-kv.js';

/** The cells of a policy's rows, without the mark in front of the one to take. */
function rowsOf(policy: string, stdout: string): string[][] {
  const rows = stdout.split('\n').map((line) => line.replace('→', ' ').trim().split(/ {2,}/));
  // Answers that nobody knows stand below the table, in lines of two cells.
  return rows.filter(([name, ...cells]) => name === policy && cells.length > 2);
}

const rowOf = (policy: string, stdout: string): string[] => rowsOf(policy, stdout)[0] ?? [];

const ask = (document: string) => runKv('compare', needleModel, '--document', document, '--question', 'Why?');

describe('kv compare of a list of questions', () => {
  let exitCode: number;
  let stdout: string;
  let stderr: string;

  beforeAll(async () => {
    const questions = [
      { question: passKeyQuestion, answer: ` ${passKey}` },
      { question: passKeyQuestion, answer: ' 00000' },
    ];
    const file = await temporaryFile('questions.json', JSON.stringify(questions));
    const args = ['--document', await passKeyFile(), '--questions', file];
    ({ exitCode, stdout, stderr } = await runKv('compare', needleModel, ...args, '--all'));
  });

  it('says which answers are right', () => {
    expect({ exitCode }).toEqual({ exitCode: 0 });
    expect(stderr).toMatch(/^To read it 18 times takes about \d+ (s|min) here\.$/m);
    expect(stderr).toMatch(/^dense: .*\(100%\), /m);
    const [policy, question, answers, heldOut, density, bytes, ratio, reserved] = rowOf('dense', stdout);
    expect({ policy, question, answers, heldOut, density, ratio, reserved }).toEqual({
      policy: 'dense',
      question: '–',
      answers: '✓✗',
      heldOut: '99.7 %',
      density: '100 %',
      ratio: '1.00×',
      reserved: '1.00×',
    });
    // 4 KiB a token in f16, in blocks of 64 tokens; the question and the answer are part of it.
    const tokens = Number(/([\d,]+) tokens$/m.exec(stdout)?.[1]?.replace(',', ''));
    expect(tokens).toBeGreaterThan(1000);
    const mebibytes = Number(bytes?.replace(' MiB', ''));
    expect(mebibytes).toBeGreaterThanOrEqual((tokens * 4) / 1024 - 0.05);
    expect(mebibytes).toBeLessThanOrEqual(((tokens + 2 * 64) * 4) / 1024 + 0.05);
  });

  it('selects with and without the question in sight, and holds as much as it says', () => {
    for (const { name, select } of policies) expect(rowsOf(name, stdout)).toHaveLength(select ? 2 : 1);
    for (const { name, select } of policies) {
      const share = Number(/-1\/(\d+)$/.exec(name)?.[1]);
      if (select === undefined || Number.isNaN(share)) continue;
      const ofPolicy = rowsOf(name, stdout);
      expect(ofPolicy.map((row) => row[1])).toEqual(['seen', 'unseen']);
      for (const row of ofPolicy) {
        // The whole prompt is there before it is selected from.
        expect(row.at(-1)).toBe('1.00×');
        // The answer stands behind what was kept, and each kv head's last block of 64 tokens is partly filled.
        const multiple = Number(row.at(-2)?.replace('×', ''));
        expect(multiple).toBeGreaterThanOrEqual(1 / share - 0.005);
        expect(multiple).toBeLessThan(1 / share + 0.09);
      }
    }
    const reserved = (name: string) => Number(rowOf(name, stdout).at(-1)?.replace('×', ''));
    expect(reserved('hierasparse-k1-v1')).toBeLessThan(reserved('hierasparse-v1'));
    expect(reserved('hierasparse-k1-v1')).toBeLessThan(1);
    expect(reserved('int4')).toBeLessThan(reserved('int8'));
    expect(reserved('int8')).toBeLessThan(1);
    expect(reserved('hcattn-1/8')).toBeLessThan(reserved('hcattn-1/4'));
    expect(reserved('hcattn-1/4')).toBeLessThan(1);
    expect(reserved('hcattn-rescored-1/16')).toBeLessThan(reserved('hcattn-rescored-1/8'));
    const rows = stdout.split('\n').map((line) => line.replace(/^→/, ' ').trim().split(/ {2,}/));
    const above = (index: number) => rows[index - 1]?.[0];
    const onHost = rows.flatMap(([name, bytes], index) => (name === 'and on the host' ? [{ name: above(index), bytes }] : []));
    expect(onHost.map(({ name }) => name)).toEqual(['hcattn-rescored-1/8', 'hcattn-rescored-1/16', 'hcattn-1/4', 'hcattn-1/8', 'hbw-1/4+hcattn', 'hbw-1/4+hcattn', 'offload-1/4', 'hbw-1/4+offload', 'hbw-1/4+offload', 'sparse-2048']);
    expect(onHost[0]?.bytes).toBe(onHost[1]?.bytes);
    expect(onHost[2]?.bytes).toBe(onHost[3]?.bytes);
  });
});

describe('kv compare', () => {
  it('answers a question whose answer is not known', async () => {
    const args = ['--document', await passKeyFile(), '--question', passKeyQuestion, '--threads', '1'];
    const { exitCode, stdout } = await runKv('compare', needleModel, ...args);
    expect(exitCode).toBe(0);
    expect(stdout).toContain(' on cpu, threads: 1,');
    expect(rowOf('dense', stdout)[1]).toBe('·');
    expect(stdout).toMatch(new RegExp(`\\n  dense +${passKey}\\.\\n`));
    expect(stdout.trimEnd().split('\n').at(-1)).toMatch(/^Take \S+: /);
    const shown = policies.filter(({ name }) => rowsOf(name, stdout).length > 0);
    expect(shown.map(({ name }) => name)).toEqual(['dense', 'hbw-1/4', 'halo-1/4', 'hierasparse-v1', 'int4', 'halo-1/4+int4', 'hcattn-rescored-1/8', 'skeleton', 'clustered', 'offload-1/4']);
  });

  it('leaves out the policies that cannot take the model, and says why', async () => {
    // The small model's weights under heads of a size that 2:4 sparse blocks do not take.
    const config = JSON.parse(await readFile(join(needleModel, 'config.json'), 'utf8')) as object;
    const heads = { head_dim: 32, num_attention_heads: 16, num_key_value_heads: 4 };
    const directory = dirname(await temporaryFile('config.json', JSON.stringify({ ...config, ...heads })));
    for (const name of ['model.safetensors', 'tokenizer.json', 'tokenizer_config.json']) {
      await symlink(join(needleModel, name), join(directory, name));
    }
    const args = ['--document', await passKeyFile(2), '--question', 'Why?'];
    const { exitCode, stdout, stderr } = await runKv('compare', directory, ...args, '--all');
    expect(exitCode).toBe(0);
    for (const { name } of policies) {
      expect({ name, rows: rowsOf(name, stdout).length > 0 }).toEqual({ name, rows: !/hierasparse|hcattn/.test(name) });
    }
    expect(stderr).toMatch(/^hbw-1\/4\+hierasparse: left out\. .*32.*64/m);
    expect(stderr).toMatch(/^hcattn-1\/8: left out\. .*codebooks-8\.safetensors is not there\. Make it: kv calibrate .* --groups 8 /m);
  });

  it('says by how much a document is too long', async () => {
    const document = await temporaryFile('long.txt', 'The sky is blue. '.repeat(4000));
    const { exitCode, stderr } = await ask(document);
    expect(exitCode).toBe(1);
    const [, given, excess] = /has ([\d,]+) tokens; .* by ([\d,]+) tokens/.exec(stderr) ?? [];
    const count = (text = ''): number => Number(text.replace(/,/g, ''));
    expect(count(given)).toBeGreaterThan(16_384);
    expect(count(excess)).toBe(count(given) + 64 - 16_384);
    expect(stderr.trimEnd().split('\n')).toHaveLength(1);
  });

  it.each([
    [
      'a missing document',
      () => Promise.resolve('/nowhere/document.txt'),
      /document .*nowhere.* cannot be read/,
    ],
    ['an empty document', () => temporaryFile('empty.txt', ' \n'), /empty\.txt is empty/],
  ])('refuses %s', async (_name, document, message) => {
    const { exitCode, stdout, stderr } = await ask(await document());
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(message);
    expect(stderr).not.toMatch(/^ {4}at /m);
  });

  it('refuses a document that is not text', async () => {
    const document = `${needleModel}/model.safetensors`;
    const { exitCode, stderr } = await ask(document);
    expect(exitCode).toBe(1);
    expect(stderr).toContain('is not UTF-8 text');
  });

  it.each([['[]'], ['{"question": "Why?"}'], ['[{"answer": "No."}]'], ['Why?']])(
    'refuses the questions %s',
    async (content) => {
      const questions = await temporaryFile('questions.json', content);
      const { exitCode, stderr } = await runKv('compare', needleModel, '--document', await passKeyFile(), '--questions', questions);
      expect(exitCode).toBe(1);
      expect(stderr).toContain('is no list of questions');
    },
  );

  it('wants a question', async () => {
    const { exitCode, stderr } = await runKv('compare', needleModel, '--document', await passKeyFile());
    expect(exitCode).toBe(1);
    expect(stderr).toContain('give --question TEXT or --questions FILE');
  });

  it('stops in good order at Ctrl-C', async () => {
    const stdout = new PassThrough().resume();
    const stderr = new PassThrough();
    let written = '';
    stderr.on('data', (chunk: Buffer) => {
      // The first sign of progress: the prompt is being read.
      if (written === '') process.emit('SIGINT');
      written += chunk.toString();
    });
    const listeners = process.listenerCount('SIGINT');
    const document = await passKeyFile();
    const args = ['compare', needleModel, '--document', document, '--question', passKeyQuestion];
    expect(await runCli(args, { stdout, stderr })).toBe(130);
    expect(written).toContain('kv: interrupted');
    expect(process.listenerCount('SIGINT')).toBe(listeners);
  });
});
