import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';

import { Costs } from '@kv/serve-scheduler';
import { describe, expect, it } from 'vitest';

import { runKv, temporaryFile } from '../testing/run-kv.js';

const h200 = createRequire(import.meta.url).resolve('@kv/serve-scheduler/h200-costs.json');
const longTrace = [3000, 60_000].map((tokens) => JSON.stringify({ timestamp: 0, input_length: tokens, output_length: 5 })).join('\n');
const few = ['--requests', '4', '--rates', '0.5', '2'];

describe('kv simulate', () => {
  it('prints the tables that were asked for, and says that they are simulated', async () => {
    const { exitCode, stdout, stderr } = await runKv('simulate', '--figure', '10', '15', ...few);
    expect({ exitCode, stderr }).toEqual({ exitCode: 0, stderr: '' });
    expect(stdout).toMatch(/^Figure 10: mean time to the first token, ms \(lwm-7b, simulated, by times of NVIDIA H200\)$/m);
    expect(stdout).toMatch(/^Figure 15: /m);
    expect(stdout).toMatch(/requests\/s.*base.*\+SA.*\+Offload.*\+LP/);
  });

  it('gives the same as JSON, the same for the same seed', async () => {
    const run = (seed: string) => runKv('simulate', '--model', 'llama3-8b', '--figure', '12', ...few, '--seed', seed, '--json');
    const { stdout } = await run('1');
    const [table] = JSON.parse(stdout) as [{ kinds: string[]; rows: number[][] }];
    expect(table.kinds).toEqual(new Array(4).fill('simulated'));
    expect(table.rows.map(([rate]) => rate)).toEqual([0.5, 2]);
    expect((await run('1')).stdout).toBe(stdout);
    expect((await run('2')).stdout).not.toBe(stdout);
  });

  it('simulates the machine of the paper, and says so', async () => {
    const { stdout } = await runKv('simulate', '--gpu', 'a100', '--figure', '14b', '--json');
    const [table] = JSON.parse(stdout) as [{ gpu: string; rows: [tokens: number, copies: number, flash: number][] }];
    expect(table.gpu).toBe('NVIDIA A100 40 GB, computed');
    // What a prompt's computing hides, saving does not add.
    for (const [, copies, flash] of table.rows) expect([copies >= 1, Math.abs(flash - 1) < 1e-9]).toEqual([true, true]);
  });

  it('draws the figures that were asked for, and marks what is simulated, measured, and of the small model', async () => {
    const file = await temporaryFile('figures.svg', '');
    const { exitCode, stdout } = await runKv('simulate', '--figure', '4', '8', '10', ...few, '--svg', file);
    expect(exitCode).toBe(0);
    expect(stdout).toMatch(new RegExp(`saved, FlashD2H .* ${new Costs().rate('save').rate.toPrecision(3)} `));
    const svg = await readFile(file, 'utf8');
    expect(svg).toMatch(/^<svg .*<\/svg>\n$/s);
    expect(svg).toContain('lwm-7b, by times of NVIDIA H200');
    expect(svg).toContain('● measured   ○ simulated   ◆ small-model');
    expect([...svg.matchAll(/Fig\. (\w+):/g)].map(([, figure]) => figure)).toEqual(['4', '8', '10']);
    // Four ways over the link; six windows, and two rates of four systems; six windows.
    const count = (what: RegExp): number => [...svg.matchAll(what)].length;
    expect([count(/<circle [^>]*r="4" fill="#2f7d5b"/g), count(/<circle [^>]*fill="#fff"/g), count(/<polygon/g)]).toEqual([4, 6 + 2 * 4, 6]);
    expect(svg).not.toMatch(/NaN|Infinity|undefined/);
  });

  it.skipIf(!existsSync('/dev/full'))('says in one line that the disk is full', async () => {
    const { exitCode, stderr } = await runKv('simulate', '--figure', '4', '--svg', '/dev/full');
    expect(exitCode).toBe(1);
    expect(stderr).toMatch(/^kv: --svg: \/dev\/full cannot be written \(ENOSPC.*\)\. Make room, or give another path\.\n$/);
  });

  it('serves a trace under every system', async () => {
    const line = (timestamp: number) => JSON.stringify({ timestamp, input_length: 3000, output_length: 5, hash_ids: [1] });
    const trace = await temporaryFile('trace.jsonl', `${line(0)}\n${line(10)}\n`);
    const { exitCode, stdout } = await runKv('simulate', '--trace', trace, '--json');
    expect(exitCode).toBe(0);
    const [{ rows }] = JSON.parse(stdout) as [{ rows: [string, ...number[]][] }];
    expect(rows.map(([system]) => system)).toEqual(['base', '+SA', '+Offload', '+FT', '+WC', '+LP']);
  });

  it.each([
    ['a malformed trace', async () => ['--trace', await temporaryFile('trace.jsonl', '{"timestamp":0}')], /Line 1 of the trace/],
    ['tables that are none', async () => ['--costs', await temporaryFile('costs.json', '[]')], /The cost tables are malformed: /],
    ['a text in place of tables', async () => ['--costs', await temporaryFile('costs.json', 'gpu: H200')], /costs\.json is no JSON; wanted cost tables/],
    ['tables of another GPU', () => ['--gpu', 'a100', '--costs', h200], /are of 'NVIDIA H200', and those of 'NVIDIA A100 40 GB, computed' are wanted/],
    ['answers that are none', () => ['--answers', '1.5'], /--answers: given '1.5'/],
    ['a rate that is none', () => ['--rates', '0'], /--rates: given '0'/],
    ['a model that there is not', () => ['--model', 'gpt-2'], /Allowed choices/],
    ['a figure that there is not', () => ['--figure', '14'], /Allowed choices/],
    ['no requests', () => ['--requests', '0'], /at least 1/],
    ['a picture that has no place', () => ['--svg', '/nowhere/figures.svg'], /\/nowhere\/figures\.svg cannot be written/],
    ['a picture in place of a folder', () => ['--svg', tmpdir()], /--svg: .* cannot be written: it is a folder/],
    ['a picture of no name', () => ['--svg', ''], /--svg: an empty path cannot be written/],
    ['a request that the memory could never hold', async () => ['--trace', await temporaryFile('trace.jsonl', longTrace)], /Request 2 of the trace has 60000 tokens and an answer of 5.* takes \d+ of \d+/],
  ])('refuses %s in one line', async (_name, args, message) => {
    const { exitCode, stdout, stderr } = await runKv('simulate', ...(await args()));
    expect({ exitCode, stdout }).toEqual({ exitCode: 1, stdout: '' });
    expect(stderr).toMatch(message);
    expect(stderr).not.toMatch(/\n {4}at /);
  });
});
