import { readFile } from 'node:fs/promises';

import { describe, expect, it } from 'vitest';

import { needleModel, runKv, temporaryFile } from '../testing/run-kv.js';

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
    const file = await temporaryFile('loads.svg', '');
    const args = ['--prompt-tokens', '1000', '--answer-tokens', '20', '--threads', '1', '--json', '--svg', file];
    const { stdout } = await runKv('bench', needleModel, '--policy', 'hbw-1/4+offload', '--requests', '2', ...args);
    const { kind, loads } = JSON.parse(stdout) as { kind: string; loads: Record<string, unknown>[] };
    expect(kind).toBe('measured');
    expect(loads).toMatchObject([{ policy: 'hbw-1/4+offload', requests: 2, promptTokens: 1000, answerTokens: 20 }]);
    for (const name of ['firstToken', 'betweenTokens', 'tokensPerSecond']) expect(loads[0]?.[name]).toBeGreaterThan(0);
    const { loadedShare = NaN } = loads[0] as { loadedShare?: number };
    expect([loadedShare >= 0, loadedShare < 1]).toEqual([true, true]);
    expect((loads[0]?.kvBytes as { host: number }).host).toBeGreaterThan(0);
    const svg = await readFile(file, 'utf8');
    expect(svg).toContain('● measured<');
    // Five charts of one load.
    expect([...svg.matchAll(/<circle/g)]).toHaveLength(5);
    expect(svg).not.toMatch(/NaN|Infinity|undefined/);
  });

  it('draws what there is of answers of one token', async () => {
    const file = await temporaryFile('one.svg', '');
    // Of so few tokens the cache of offload-1/4 reads none.
    const args = ['--policy', 'dense', 'offload-1/4', '--requests', '1', '--prompt-tokens', '4', '--answer-tokens', '1', '--threads', '1'];
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, ...args, '--svg', file);
    expect({ exitCode, stderr }).toMatchObject({ exitCode: 0 });
    // Such an answer holds nothing when it is told of.
    const rows = stdout.trimEnd().split('\n').slice(4).map((line) => line.trim().split(/ {2,}/));
    expect(rows.map(([policy, , , between, , held]) => [policy, between, held])).toEqual([['dense', '–', '–'], ['offload-1/4', '–', '–']]);
    const svg = await readFile(file, 'utf8');
    // One of each policy in the charts of the first token and of tokens a second.
    expect([...svg.matchAll(/<circle/g)]).toHaveLength(4);
    expect(svg).not.toMatch(/NaN|Infinity|undefined/);
  });

  it('asks held-out examples by what answers read, of the small model', async () => {
    const file = await temporaryFile('table.svg', '');
    // A budget that is named twice is asked once.
    const args = ['--budgets', '128', '512', '128', '--examples', '1', '--prompt-tokens', '1024', '--threads', '1'];
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, ...args, '--svg', file);
    expect({ exitCode, stderr }).toMatchObject({ exitCode: 0 });
    expect(stderr).toMatch(/^questions: 7\/7 examples/m);
    expect(stdout).toMatch(/^.*needle-8m, small-model, on cpu/);
    const [head, ...rows] = stdout.trimEnd().split('\n').slice(3).map((line) => line.trim().split(/ {2,}/));
    expect(head).toEqual(['task', 'examples', '128', '512', 'all']);
    expect(rows).toHaveLength(8);
    // The model answers all of these; a budget of half the text may cost some.
    for (const [, , , , all] of rows) expect(all).toBe('100 %');
    const [, examples, few, more] = rows.at(-1) ?? [];
    expect(examples).toBe('7');
    expect(parseFloat(few ?? '')).toBeLessThanOrEqual(parseFloat(more ?? ''));
    // Seven tasks and their mean, of three budgets, as diamonds.
    expect([...(await readFile(file, 'utf8')).matchAll(/<polygon/g)]).toHaveLength(8 * 3);
  });

  it('refuses requests that are longer than what the model was made for', async () => {
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, '--policy', 'dense', '--requests', '1', '--prompt-tokens', '20000', '--answer-tokens', '1');
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(/--prompt-tokens and --answer-tokens are 20000 and 1; the model's context has 16384 tokens/);
  });

  it('fails when no policy could be measured', async () => {
    const { exitCode, stdout, stderr } = await runKv('bench', needleModel, '--policy', 'dense', '--requests', '4096', '--prompt-tokens', '16000', '--answer-tokens', '1');
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(/dense, 4096 at once: left out\. .*\nkv: No policy could be measured/);
  });

  it.each([
    [['--requests', '0'], /at least 1/],
    [['--requests', '8', '100000'], /at least 1 and at most 4096/],
    [['--policy', 'magic'], /Allowed choices/],
    [['--examples', '1'], /--examples are asked with --budgets/],
    [['--budgets', '512', '--prompt-tokens', '1000'], /--prompt-tokens: given 1000; the model's examples have 1024, 2048, 4096, 8192 tokens/],
    [['--budgets', '2000', '--prompt-tokens', '1024', '--examples', '1'], /--budgets: given 2000; wanted tokens that are fewer than/],
    // Before anything is read.
    [['--budgets', '512', '64', '--prompt-tokens', '1024', '--examples', '1'], /^kv: --budgets is 64; it must be a whole number from 97 to \d+\.\n$/],
    [['--budgets', '512', '--policy', 'dense'], /cannot be used with option '--policy/],
    [['--svg', ''], /--svg: an empty path/],
  ])('refuses %j', async (args, message) => {
    const { exitCode, stderr } = await runKv('bench', needleModel, ...args);
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(message);
  });
});
