import { CapabilityError, densePagedStore, InvalidValueError, kvPolicy } from '@kv/sparse-core';
import type { FloatDType, KvStoreFactory } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import { needleModel } from '../testing/paths.js';
import { randomNumbers } from '../testing/random-model.js';
import { recordedStep, withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { BatchEntry } from './batch-entry.js';
import type { Runner } from './runner.js';

const vocabulary = 4096;
const steps = 3;
const prompts = Array.from({ length: 24 }, (_, index) =>
  Int32Array.from({ length: 3 + 17 * index }, (_each, token) => (token * 37 + index * 101) % vocabulary),
);
/** What an answer is fed, whatever it says. */
const fed = (prompt: number, step: number): number => (prompt * 53 + step * 977) % vocabulary;

/** The logits of the steps of each answer, where a random number of others is in each step, in a random order. */
async function answers(runner: Runner, chosen: readonly number[], mostAtOnce: number): Promise<Map<number, Float32Array[]>> {
  const random = randomNumbers(mostAtOnce);
  const logits = new Map<number, Float32Array[]>();
  const waiting = [...chosen].sort(() => random());
  let underWay: { prompt: number; sequence: ReturnType<Runner['openSequence']>; of: Float32Array[] }[] = [];
  while (waiting.length + underWay.length > 0) {
    const isRoom = underWay.length < mostAtOnce && waiting.length > 0;
    if (isRoom && (underWay.length === 0 || random() > -0.5)) {
      const prompt = waiting.pop() ?? NaN;
      const sequence = runner.openSequence();
      using first = await prefill(runner, sequence, prompts[prompt] ?? []);
      const of = [await first.read()];
      logits.set(prompt, of);
      underWay.push({ prompt, sequence, of });
      continue;
    }
    underWay.sort(() => random());
    const inStep = underWay.slice(0, 1 + Math.floor(((random() + 1) / 2) * underWay.length));
    const entries = inStep.map(({ prompt, sequence, of }): BatchEntry => ({ sequence, ids: [fed(prompt, of.length)], phase: 'decode' }));
    const rows = await recordedStep(runner, entries);
    inStep.forEach(({ of }, row) => of.push(rows.slice(row * vocabulary, (row + 1) * vocabulary)));
    for (const { sequence, of } of underWay) if (of.length > steps) sequence.dispose();
    underWay = underWay.filter(({ of }) => of.length <= steps);
  }
  return logits;
}

describeOnEachKind('a deterministic runner', (kind) => {
  const options = { kind, contextTokens: 640, maxBatchRows: 64, deterministic: true } as const;
  const dense = (dtype: FloatDType) => kvPolicy({ store: densePagedStore({ dtype, blockTokens: 16 }) });

  it.each([
    [5, 'f32'],
    [24, 'f32'],
    [12, 'bf16'],
    [24, 'bf16'],
  ] as const)('of %d sequences in %s gives each answer the bits that it has alone', async (sequences, dtype) => {
    const all = { ...options, sequences, cacheTokens: 12_000, policy: dense(dtype), activations: dtype };
    await withRunner(needleModel, all, async (runner) => {
      const together = await answers(runner, Array.from(prompts.keys()), sequences);
      for (const prompt of [0, 3, 9, 16, 17, 23]) expect((await answers(runner, [prompt], 1)).get(prompt)).toEqual(together.get(prompt));
    });
  });

  it('answers one at a time as others do', () =>
    withRunner(needleModel, { ...options, sequences: 3, policy: dense('f32') }, async (runner) => {
      const answer = async (index: number): Promise<number[]> => {
        const ids: number[] = [];
        for await (const { id } of generateTokens(runner, prompts[index] ?? [], { maxTokens: 8, endIds: [] })) ids.push(id);
        return ids;
      };
      const alone = [await answer(2), await answer(5), await answer(9)];
      expect(await Promise.all([2, 5, 9].map(answer))).toEqual(alone);
    }));

  it('takes answers in steps alone, and one prompt at a time', () =>
    withRunner(needleModel, { ...options, sequences: 3, policy: dense('f32') }, async (runner) => {
      const [first, second, third] = [runner.openSequence(), runner.openSequence(), runner.openSequence()];
      for (const sequence of [first, second]) (await prefill(runner, sequence, [1, 2, 3])).dispose();
      const decode = (sequence = first): BatchEntry => ({ sequence, ids: [4], phase: 'decode' });
      const prompt = (sequence = third): BatchEntry => ({ sequence, ids: [4, 5], phase: 'prefill' });
      for (const entries of [[decode()], [prompt(), prompt(second)], [prompt(), decode()]]) {
        expect(() => runner.createBatch(entries)).toThrow(InvalidValueError);
        expect(() => runner.createBatch(entries)).toThrow(/one prompt.*deterministic/);
      }
      for (const entries of [[prompt(), prompt(second)], [prompt(), decode()], [decode(), decode()]]) {
        await expect(runner.step(entries)).rejects.toThrow(InvalidValueError);
      }
      expect(await recordedStep(runner, [decode(), decode(second)])).toHaveLength(2 * vocabulary);
    }));

  it('refuses what it cannot be', () =>
    withRunner(needleModel, { kind, contextTokens: 64 }, async (_runner, model) => {
      const { live } = model.device.memory();
      const without: KvStoreFactory = {
        name: 'without',
        create: (...args) => densePagedStore().create(...args).map((store) => Object.assign(store, { capability: () => undefined })),
      };
      const create = (given: object) => () => model.createRunner({ contextTokens: 64, deterministic: true, ...given });
      expect(create({ sequences: 9, maxBatchRows: 8 })).toThrow(InvalidValueError);
      expect(create({ deterministic: 1 })).toThrow(InvalidValueError);
      expect(create({ policy: kvPolicy({ store: without }) })).toThrow(CapabilityError);
      expect(create({ policy: kvPolicy({ store: without }) })).toThrow(/deterministic runner/);
      expect(model.device.memory().live).toBe(live);
      const unrecorded: KvStoreFactory = {
        name: 'unrecorded',
        create: (...args) =>
          densePagedStore().create(...args).map((store) =>
            Object.assign(store, {
              startDecode: () => {
                throw new CapabilityError('cannot be recorded');
              },
            }),
          ),
      };
      using runner = model.createRunner({ contextTokens: 64, deterministic: true, policy: kvPolicy({ store: unrecorded }) });
      using sequence = runner.openSequence();
      (await prefill(runner, sequence, [1, 2])).dispose();
      await expect(runner.step([{ sequence, ids: [3], phase: 'decode' }])).rejects.toThrow('cannot be recorded');
    }));
});
