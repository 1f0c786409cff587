import { readFile, symlink } from 'node:fs/promises';
import { dirname, join } from 'node:path';

import { devices } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import type { Question } from '../compare/questions.js';
import { policies } from '@kv/policies';
import { passKey, passKeyDocument, passKeyQuestion } from '../testing/pass-key-document.js';
import { needleModel, runKv, temporaryFile } from '../testing/run-kv.js';

describe('kv generate', () => {
  it('writes the answer to stdout and the timing to stderr', async () => {
    const file = await temporaryFile('prompt.txt', passKeyDocument() + passKeyQuestion);
    const { exitCode, stdout, stderr } = await runKv(
      'generate',
      needleModel,
      '--prompt-file',
      file,
      '--stop',
      '.',
      '\n',
    );
    expect({ exitCode, stdout }).toEqual({ exitCode: 0, stdout: ` ${passKey}\n` });
    expect(stderr).toMatch(/^prompt: [\d,]+ tokens at [\d,]+\/s, first token after \d/m);
    expect(stderr).toMatch(/^answer: \d+ tokens at [\d,.]+\/s; KV cache [\d.]+ MiB$/m);
  });

  it('says how much of the attention a sparse policy computed, and why it was not less', async () => {
    const answer = async (text: string, policy: string): Promise<string> => {
      const file = await temporaryFile('prompt.txt', text);
      return (await runKv('generate', needleModel, '--prompt-file', file, '--max-new-tokens', '2', '--policy', policy)).stderr;
    };
    const long = passKeyDocument() + passKeyQuestion;
    expect(await answer(long, 'clustered')).toMatch(/^attention: [1-9][\d.]* % of the prompt's was computed/m);
    const tooLong = "attention: 100 % of the prompt's was computed; all because the estimate would take longer than it saves\n";
    expect(await answer('def add(', 'skeleton')).toContain(tooLong);
    expect(await answer('def add(', 'dense')).not.toContain('attention');
  });

  it('holds what the policy keeps of the prompt', async () => {
    const file = await temporaryFile('prompt.txt', passKeyDocument() + passKeyQuestion);
    const held = new Map<string, number>();
    const kibibytes = async (policy: string): Promise<number> => {
      const known = held.get(policy);
      if (known !== undefined) return known;
      const args = ['--prompt-file', file, '--stop', '\n', '--max-new-tokens', '2', '--policy', policy];
      const { exitCode, stderr } = await runKv('generate', needleModel, ...args);
      expect({ policy, exitCode }).toEqual({ policy, exitCode: 0 });
      const [, figure, unit] = /KV cache ([\d.]+) ([KM])iB/.exec(stderr) ?? [];
      const value = Number(figure) * (unit === 'K' ? 1 : 1024);
      held.set(policy, value);
      return value;
    };
    const dense = await kibibytes('dense');
    for (const { name, select } of policies) {
      const share = select === undefined ? 1 : Number(/-1\/(\d+)$/.exec(name)?.[1]);
      if (Number.isNaN(share) || /^(hierasparse|int|hcattn|offload|sparse)/.test(name)) continue;
      const multiple = (await kibibytes(name)) / dense;
      // The last block of 64 tokens of each kv head is partly filled.
      expect(multiple).toBeGreaterThanOrEqual(1 / share - 0.005);
      expect(multiple).toBeLessThan(1 / share + 0.09);
    }
    // A sparse block has 9/16 of the bytes of a dense one; the first 64 tokens and the last 256 stay dense.
    const half = await kibibytes('hierasparse-v1');
    expect(half / dense).toBeGreaterThan((1 + 9 / 16) / 2);
    expect(half / dense).toBeLessThan(0.9);
    const whole = await kibibytes('hierasparse-k1-v1');
    // Figures of MiB are rounded to a tenth: six halves of 0.1 MiB.
    expect(Math.abs(dense - whole - 2 * (dense - half))).toBeLessThan(6 * 0.05 * 1024 + 1);
    expect(await kibibytes('hbw-1/4+hierasparse')).toBeLessThan(await kibibytes('hbw-1/4'));
    // Codes and scales of 64 dims, of 128 bytes in f16; the last 64 tokens and the block that fills stay dense.
    for (const [codec, bytes] of [['int8', 66], ['int4', 34]] as const) {
      const codes = (await kibibytes(codec)) / dense;
      expect(codes).toBeGreaterThan(bytes / 128);
      expect(codes).toBeLessThan(bytes / 128 + 0.15);
    }
    expect(await kibibytes('halo-1/4+int4')).toBeLessThan(await kibibytes('halo-1/4'));
    // The device holds all of a prompt inside the budget, and metadata of up to two rows for each block of 32.
    for (const name of ['offload-1/4', 'sparse-2048']) {
      const resident = (await kibibytes(name)) / dense;
      expect(resident).toBeGreaterThan(1);
      expect(resident).toBeLessThan(1 + 2 / 32 + 0.09);
    }
    // Codes of 13 bits for 2 or 4 of the 64 dims of a key; the first 64 tokens, the last 128 and the block that fills stay dense.
    // Those for 8 dims have 12 bits; only the last 64 and the block that fills stay dense there.
    for (const [name, bytes, more] of [['hcattn-1/4', 52, 0.25], ['hcattn-1/8', 26, 0.25], ['hcattn-rescored-1/16', 12, 0.125]] as const) {
      const codes = (await kibibytes(name)) / dense;
      expect(codes).toBeGreaterThan(bytes / 256);
      expect(codes).toBeLessThan(bytes / 256 + more);
    }
    expect(await kibibytes('hbw-1/4+hcattn')).toBeLessThan(await kibibytes('hbw-1/4'));
    expect(await kibibytes('hbw-1/4+offload')).toBeLessThan(0.5 * (await kibibytes('offload-1/4')));
  });

  it('says what is on the device and what on the host, and what a model without codebooks lacks', async () => {
    const file = await temporaryFile('prompt.txt', passKeyDocument() + passKeyQuestion);
    const { stdout, stderr } = await runKv('generate', needleModel, '--prompt-file', file, '--stop', '\n', '--policy', 'hcattn-1/4');
    expect(stdout).toContain(passKey);
    expect(stderr).toMatch(/KV cache [\d.]+ MiB on the device, [\d.]+ MiB on the host$/m);
    const directory = dirname(await temporaryFile('config.json', await readFile(join(needleModel, 'config.json'), 'utf8')));
    for (const name of ['model.safetensors', 'tokenizer.json', 'tokenizer_config.json']) {
      await symlink(join(needleModel, name), join(directory, name));
    }
    const lacking = await runKv('generate', directory, '--prompt', 'a', '--policy', 'hcattn-1/8');
    expect(lacking.exitCode).toBe(1);
    expect(lacking.stderr).toMatch(/codebooks-16\.safetensors is not there\. Make it: kv calibrate \S+ --groups 16 --text FILE --out \S+codebooks-16\.safetensors/);
  });

  it.each(['dense', 'hierasparse-v1'])('finds three facts that stand far apart in the document of the main job: %s', async (policy) => {
    const folder = join(needleModel, 'documents/constitution');
    const document = await readFile(join(folder, 'document.txt'), 'utf8');
    const [first] = JSON.parse(await readFile(join(folder, 'questions.json'), 'utf8')) as [Question];
    expect(first.question).toBe('What are the pass keys for island, palace and cobalt?');
    const file = await temporaryFile('prompt.txt', `${document.trimEnd()}\n${first.question}`);
    const args = ['--prompt-file', file, '--stop', '.', '\n', '--policy', policy];
    const { stdout } = await runKv('generate', needleModel, ...args);
    expect(stdout).toBe(`${first.answer}\n`);
  });

  it('writes at most as many tokens as asked for', async () => {
    const { stdout, stderr } = await runKv(
      'generate',
      needleModel,
      '--prompt',
      'def add(',
      '--max-new-tokens',
      '3',
    );
    expect(stdout.trim()).not.toBe('');
    expect(stderr).toMatch(/^answer: [123] tokens/m);
  });

  it('draws the same text from the same seed, and others from others', async () => {
    const draw = async (seed: number): Promise<string> => {
      const sampling = ['--temperature', '1.5', '--top-k', '200', '--top-p', '0.99', '--min-p', '0.001'];
      const args = [
        '--prompt',
        'import ',
        '--max-new-tokens',
        '24',
        '--repetition-penalty',
        '1.1',
        ...sampling,
      ];
      const { exitCode, stdout } = await runKv('generate', needleModel, ...args, '--seed', String(seed));
      expect(exitCode).toBe(0);
      return stdout;
    };
    const [first, again, other] = [await draw(1), await draw(1), await draw(2)];
    expect(again).toBe(first);
    expect(other).not.toBe(first);
  });

  it.each([
    ['no prompt', [], 'give --prompt TEXT or --prompt-file FILE'],
    ['an empty prompt', ['--prompt', ''], "'--prompt <text>' argument '' is invalid. It must be a text of at least one character."],
    ['two prompts', ['--prompt', 'a', '--prompt-file', 'b'], 'cannot be used with'],
    ['a chat with a model that has no template', ['--prompt', 'Hello', '--chat'], 'it completes text. Give it a prompt, not messages. Leave out --chat.'],
    ['an unknown policy', ['--prompt', 'a', '--policy', 'magic'], 'Allowed choices are dense'],
    ['no tokens', ['--prompt', 'a', '--max-new-tokens', '0'], 'at least 1'],
    ['a share above 1', ['--prompt', 'a', '--temperature', '1', '--top-p', '1.5'], '--top-p is 1.5; it must be'],
    ['an empty end of answers', ['--prompt', 'a', '--stop', ''], "--stop is ''; it must be non-empty strings"],
    ['too many threads', ['--prompt', 'a', '--threads', '100000'], 'threads is 100000'],
    ['a device of no kind', ['--prompt', 'a', '--device', 'abacus'], "kind 'abacus'"],
  ])('refuses %s', async (_name, args, message) => {
    const { exitCode, stdout, stderr } = await runKv('generate', needleModel, ...args);
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toContain(message);
    expect(stderr).not.toMatch(/^ {4}at /m);
  });

  it('says by how much a prompt is too long', async () => {
    const file = await temporaryFile('long.txt', 'The sky is blue. '.repeat(4000));
    const { exitCode, stderr } = await runKv('generate', needleModel, '--prompt-file', file);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/^kv: The prompt has [\d,]+ tokens; .* Shorten it by [\d,]+ tokens .*\n$/);
  });

  it('does not ask to shorten a prompt by more than it has', async () => {
    const { exitCode, stderr } = await runKv('generate', needleModel, '--prompt', 'def', '--max-new-tokens', '1000000');
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/^kv: The prompt has 2 tokens; .* an answer of 1,000,000\. Lower --max-new-tokens, or use a model with a longer context\.\n$/);
  });

  it.skipIf(devices().includes('cuda'))('says why there is no CUDA', async () => {
    const { exitCode, stderr } = await runKv('generate', needleModel, '--prompt', 'a', '--device', 'cuda');
    expect(exitCode).toBe(1);
    expect(stderr).toContain('CUDA');
  });
});
