import { InvalidValueError } from '@kv/sparse-core';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';

import { generate } from '../generate/generate.js';
import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import { Model } from '../model.js';
import { needleModel } from '../testing/paths.js';
import type { Runner } from './runner.js';

let model: Model;
let runner: Runner;
beforeAll(async () => {
  model = await Model.open(needleModel);
  runner = model.createRunner({ contextTokens: 64 });
});
afterAll(() => {
  runner.dispose();
  model.dispose();
});

function detached(): Int32Array {
  const ids = Int32Array.of(1, 2, 3);
  structuredClone(ids.buffer, { transfer: [ids.buffer] });
  return ids;
}

/** An array whose buffer was made smaller behind its back. */
function resized(): Int32Array {
  const Resizable = ArrayBuffer as unknown as new (bytes: number, options: { maxByteLength: number }) => ArrayBuffer;
  const buffer = new Resizable(12, { maxByteLength: 24 }) as ArrayBuffer & { resize(bytes: number): void };
  const ids = new Int32Array(buffer, 4, 2);
  buffer.resize(4);
  return ids;
}

const thrown = (): never => {
  throw new Error('trap');
};

const prompts: [string, unknown][] = [
  ['an array-like of 5e8', { length: 5e8 }],
  ['an array-like of 2^53', { length: 2 ** 53, 0: 1 }],
  ['an array-like of fewer than it says', { length: 3, 0: 1 }],
  ['a negative length', { length: -1 }],
  ['a length that is no number', { length: '3', 0: 1, 1: 1, 2: 1 }],
  ['a length that is an object', { length: { valueOf: thrown } }],
  ['a Proxy whose traps throw', new Proxy([1, 2], { get: thrown, has: thrown })],
  ['a Proxy of no end', new Proxy({}, { get: (_target, key) => (key === 'length' ? 1e9 : 1) })],
  ['a revoked Proxy', revoked()],
  ['a detached array', detached()],
  ['a resized array', resized()],
  ['big integers', BigInt64Array.of(1n)],
  ['symbols', [Symbol('id')]],
  ['objects', [{ valueOf: () => 1 }]],
  ['nothing', null],
  ['a number', 5],
  ['a fraction', [1.5]],
  ['an id of 2^32', [2 ** 32]],
  ['holes', Object.assign(new Array<number>(3), { 0: 1, 2: 2 })],
];

function revoked(): number[] {
  const { proxy, revoke } = Proxy.revocable([1, 2], {});
  revoke();
  return proxy;
}

async function consume(answer: AsyncIterable<unknown>): Promise<void> {
  for await (const token of answer) expect(token).toBeDefined();
}

describe('a prompt', () => {
  it.each(prompts)('of %s is refused at once, wherever it is given', async (_name, given) => {
    const prompt = given as number[];
    const before = process.cpuUsage();
    using sequence = runner.openSequence();
    const entries = [{ sequence, ids: prompt, phase: 'prefill-end' as const }];
    await expect(prefill(runner, sequence, prompt)).rejects.toThrow(InvalidValueError);
    expect(() => runner.createBatch(entries)).toThrow(InvalidValueError);
    await expect(runner.step(entries)).rejects.toThrow(InvalidValueError);
    expect(sequence.length).toBe(0);
    await expect(consume(generateTokens(runner, prompt, { sequence }))).rejects.toThrow(InvalidValueError);
    await expect(consume(generate(runner, model.tokenizer, prompt, { sequence }))).rejects.toThrow(InvalidValueError);
    sequence.dispose();
    await expect(consume(generateTokens(runner, prompt))).rejects.toThrow(InvalidValueError);
    await expect(consume(generate(runner, model.tokenizer, prompt))).rejects.toThrow(InvalidValueError);
    const { user, system } = process.cpuUsage(before);
    expect((user + system) / 1000).toBeLessThan(1000);
  });

  it('is read once: what changes afterwards, or answers otherwise the second time, does not count', async () => {
    using sequence = runner.openSequence();
    let reads = 0;
    const lying = new Proxy([5, 6, 7], {
      get: (target, key) => (key === 'length' ? [3, 4e8][Math.min(reads++, 1)] : target[Number(key)]),
    });
    const shared = new Int32Array(new SharedArrayBuffer(12));
    shared.set([5, 6, 7]);
    const read = prefill(runner, sequence, shared);
    shared.fill(2 ** 30);
    const logits = await (await read).read();
    sequence.dispose();
    using other = runner.openSequence();
    expect(await (await prefill(runner, other, lying)).read()).toEqual(logits);
  });

  it('that a batch was made of may change before it runs', async () => {
    using sequence = runner.openSequence();
    const ids = [5, 6, 7];
    using batch = runner.createBatch([{ sequence, ids, phase: 'prefill-end' }]);
    ids.fill(2 ** 30);
    runner.embed(batch);
    await runner.runLayers(batch, 0, model.config.layers);
    expect([...sequence.ids]).toEqual([5, 6, 7]);
  });
});
