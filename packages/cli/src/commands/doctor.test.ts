import { existsSync } from 'node:fs';

import { describe, expect, it } from 'vitest';

import { describeAmx, runtime } from './doctor.js';
import { runKv } from '../testing/run-kv.js';

describe('kv doctor', () => {
  it('names the binary that runs, and finds that the CPU works', async () => {
    const { exitCode, stdout, stderr } = await runKv('doctor');
    expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: '' });
    const [, name = '', path = ''] = /^binary +(\S+) .*\n +(\S.*)$/m.exec(stdout) ?? [];
    expect(name).toMatch(/^@kv\/sparse-core-/);
    expect(existsSync(path)).toBe(true);
    expect(stdout).toMatch(/^device +cpu, threads: \d+, kernels: (baseline|avx2|avx512|amx): works$/m);
    expect(stdout).toMatch(/^ +reads (1 row|[24] rows) of weights at once, asked for (once|6 times) in cache [12]$/m);
    expect(stdout).toContain(process.version);
    expect(stdout).toContain('This installation is usable.');
  });

  it('calls what runs it by its name', () => {
    const { node } = process.versions;
    expect(runtime(process.versions)).toEqual(['Node', process.version]);
    expect(runtime({ ...process.versions, bun: '1.3.0' })).toEqual(['Bun', `1.3.0, as Node ${node}`]);
    expect(runtime({ ...process.versions, deno: '2.5.1' })).toEqual(['Deno', `2.5.1, as Node ${node}`]);
  });

  it('says whether the tile registers of a processor are used', () => {
    expect(describeAmx('absent')).toEqual([]);
    expect(describeAmx('refused')).toEqual([['AMX', expect.stringMatching(/^not used: the system /)]]);
    expect(describeAmx('ready')).toEqual([['AMX', 'used']]);
  });

  it('says whether CUDA is used, and why not', async () => {
    const { stdout } = await runKv('doctor');
    expect(stdout).toMatch(/^CUDA +(used|not used: \S.+)\n +compiler: \S.*\n +driver: \S.*\n +GPU: \S.*$/m);
  });
});
