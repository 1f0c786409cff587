import { describe, expect, it } from 'vitest';

import { needleModel, runKv } from '../testing/run-kv.js';

const small = ['--prompt-tokens', '200', '--answer-tokens', '6', '--threads', '1'];

describe('kv bench', () => {
  it('says what requests at once take under each policy', async () => {
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, '--policy', 'dense', 'int8', '--requests', '1', '3', ...small);
    expect({ exitCode, stderr }).toMatchObject({ exitCode: 0 });
    expect(stderr).toMatch(/^int8, 3 at once: 18\/18 tokens \(100%\)/m);
    expect(stdout).toMatch(/ on cpu, threads: 1,.*\nprompts of 200 random tokens that come at once, answers of 6\n/);
    const rows = stdout.trimEnd().split('\n').slice(4).map((line) => line.trim().split(/ {2,}/));
    expect(rows.map(([policy, requests]) => [policy, requests])).toEqual([['dense', '1'], ['dense', '3'], ['int8', '1'], ['int8', '3']]);
    for (const row of rows) expect(row).toHaveLength(7);
    const held = rows.map((row) => parseFloat(row[5] ?? '') * (row[5]?.endsWith('MiB') === true ? 1024 : 1));
    expect(held[1]).toBeGreaterThan(2 * (held[0] ?? NaN));
    expect(held[2]).toBeLessThan(held[0] ?? NaN);
  });

  it('gives the same as JSON, with what is on the host', async () => {
    const { stdout } = await runKv('bench', needleModel, '--policy', 'hbw-1/4+offload', '--requests', '2', ...small, '--json');
    const { kind, loads } = JSON.parse(stdout) as { kind: string; loads: Record<string, unknown>[] };
    expect(kind).toBe('measured');
    expect(loads).toMatchObject([{ policy: 'hbw-1/4+offload', requests: 2, promptTokens: 200, answerTokens: 6 }]);
    for (const name of ['firstToken', 'betweenTokens', 'tokensPerSecond']) expect(loads[0]?.[name]).toBeGreaterThan(0);
    expect((loads[0]?.kvBytes as { host: number }).host).toBeGreaterThan(0);
  });

  it('refuses requests that are longer than what the model was made for', async () => {
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, '--policy', 'dense', '--requests', '1', '--prompt-tokens', '20000', '--answer-tokens', '1');
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(/--prompt-tokens and --answer-tokens are 20000 and 1; the model's context has 16384 tokens/);
  });

  it('fails when no policy could be measured', async () => {
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, '--policy', 'dense', '--requests', '100000', '--prompt-tokens', '16000', '--answer-tokens', '1');
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(/dense, 100000 at once: left out\. .*\nkv: No policy could be measured/);
  });

  it.each([
    [['--requests', '0'], /at least 1/],
    [['--policy', 'magic'], /Allowed choices/],
  ])('refuses %j', async (args, message) => {
    const { exitCode, stderr } = await runKv('bench', needleModel, ...args);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(message);
  });
});
