import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

import { describe, expect, it } from 'vitest';

import { needleModel, runKv } from '../testing/run-kv.js';

describe('kv inspect', () => {
  it('says how to download what looks like the name of a model', async () => {
    for (const args of [['inspect', 'org/name'], ['generate', 'org/name', '--prompt', 'a']]) {
      const { exitCode, stdout, stderr } = await runKv(...args);
      expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
      expect(stderr).toContain('org/name: no such directory. A model is opened from a directory');
      expect(stderr).toContain('"hf download org/name --local-dir org/name"');
    }
    expect((await runKv('inspect', '/nowhere/at/all')).stderr).not.toContain('download');
  });

  it('says what the model card says', async () => {
    const { exitCode, stdout } = await runKv('inspect', needleModel);
    expect(exitCode).toBe(0);
    expect(stdout).toMatch(/^family +llama$/m);
    expect(stdout).toMatch(/^layers +8$/m);
    expect(stdout).toMatch(/^heads +8 for queries, 2 for keys and values, of size 64$/m);
    expect(stdout).toMatch(/^parameters +7,999,744$/m);
    expect(stdout).toMatch(/^vocabulary +4,096 tokens, tied head$/m);
    expect(stdout).toMatch(/^context +16,384 tokens$/m);
    expect(stdout).toMatch(/^weights +15\.3 MiB of bf16 in \d+ tensors, files: 1$/m);
    expect(stdout).toMatch(/^KV cache +4\.0 KiB a token in f16$/m);
    // 16,384 tokens of 4 KiB.
    expect(stdout).toMatch(/^ +64\.0 MiB for the whole context$/m);
  });

  it('refuses a directory without a model, in one line without a stack', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'kv-cli-'));
    const { exitCode, stdout, stderr } = await runKv('inspect', folder);
    expect(exitCode).toBe(1);
    expect(stdout).toBe('');
    expect(stderr).toMatch(/^kv: .*config\.json.*\n$/);
  });

  it('refuses a config of an unknown family by its name', async () => {
    const folder = await mkdtemp(join(tmpdir(), 'kv-cli-'));
    await writeFile(join(folder, 'config.json'), JSON.stringify({ model_type: 'mamba' }));
    const { exitCode, stderr } = await runKv('inspect', folder);
    expect(exitCode).toBe(1);
    expect(stderr).toContain('mamba');
    expect(stderr).not.toMatch(/^ {4}at /m);
  });
});
