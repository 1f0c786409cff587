import { densePagedStore, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import type { KvStore, KvStoreFactory, Recording } from '@kv/sparse-core';
import { liveBytes } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { needleModel } from '../testing/paths.js';
import { randomNumbers } from '../testing/random-model.js';
import { recordedStep, unrecordedStep, withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { BatchEntry } from './batch-entry.js';
import type { Runner } from './runner.js';
import type { RunnerOptions } from './runner-options.js';
import type { Sequence } from './sequence.js';

const vocabulary = 4096;
const contextTokens = 256;

function randomIds(length: number, seed: number): Int32Array {
  const random = randomNumbers(seed);
  return Int32Array.from({ length }, () => Math.floor(((random() + 1) / 2) * vocabulary));
}

/** Opens a sequence and reads a prompt into it. */
async function read(runner: Runner, tokens: number, seed: number): Promise<Sequence> {
  const sequence = runner.openSequence();
  using logits = await runner.step([{ sequence, ids: randomIds(tokens, seed), phase: 'prefill-end' }]);
  await logits.read();
  return sequence;
}

const answers = (sequences: readonly Sequence[], seed: number): BatchEntry[] =>
  sequences.map((sequence, index) => ({ sequence, ids: randomIds(1, seed + index), phase: 'decode' }));

/** Counts the recordings that a runner makes. */
function countRecordings(runner: Runner): () => number {
  const { stream } = runner;
  const record = stream.record.bind(stream);
  let count = 0;
  stream.record = (enqueue) => {
    count += 1;
    return record(enqueue);
  };
  return () => count;
}

describeOnEachKind('a recorded step', (kind) => {
  const use = (options: RunnerOptions, body: (runner: Runner) => Promise<void>): Promise<void> =>
    withRunner(needleModel, { kind, contextTokens, sequences: 8, ...options }, body);

  describe.each(['f32', 'bf16'] as const)('in %s', (dtype) => {
    const policy = kvPolicy({ store: densePagedStore({ dtype }) });
    const options = { activations: dtype, policy };

    it.each([1, 3])('has the bits of an unrecorded one, for %d sequences and over borders of blocks', (count) =>
      use(options, async (runner) => {
        const recordings = countRecordings(runner);
        const lengths = Array.from({ length: count }, (_, index) => 50 + 11 * index);
        const ours: Sequence[] = [];
        const theirs: Sequence[] = [];
        for (const [index, tokens] of lengths.entries()) {
          ours.push(await read(runner, tokens, index));
          theirs.push(await read(runner, tokens, index));
        }
        for (let step = 0; step < 90; step += 1) {
          const logits = await recordedStep(runner, answers(ours, 100 * step));
          expect(logits.some((logit) => logit !== 0)).toBe(true);
          expect(logits).toEqual(await unrecordedStep(runner, answers(theirs, 100 * step)));
        }
        expect(ours.map(({ length }) => length)).toEqual(lengths.map((tokens) => tokens + 90));
        expect(recordings()).toBe(1);
      }),
    );

    it('follows sequences that come, go, take over slots, and mix with other steps', () =>
      use(options, async (runner) => {
        const recordings = countRecordings(runner);
        const pairs: [Sequence, Sequence][] = [];
        const open = async (tokens: number, seed: number): Promise<void> => {
          pairs.push([await read(runner, tokens, seed), await read(runner, tokens, seed)]);
        };
        const compare = async (seed: number): Promise<void> => {
          const [ours, theirs] = [pairs.map(([one]) => one), pairs.map(([, other]) => other)];
          expect(await recordedStep(runner, answers(ours, seed))).toEqual(await unrecordedStep(runner, answers(theirs, seed)));
        };
        await open(30, 1);
        for (let step = 0; step < 4; step += 1) await compare(step);
        await open(70, 2);
        for (let step = 0; step < 4; step += 1) await compare(10 + step);
        // Steps that nobody waits for, of a sequence that goes meanwhile.
        const [gone] = pairs.splice(0, 1);
        for (let step = 0; step < 3; step += 1) {
          for (const sequence of gone ?? []) (await runner.step(answers([sequence], step))).dispose();
        }
        for (const sequence of gone ?? []) sequence.dispose();
        for (let step = 0; step < 4; step += 1) await compare(20 + step);
        await open(130, 3);
        await open(5, 4);
        for (let step = 0; step < 4; step += 1) await compare(30 + step);
        expect(recordings()).toBe(3);
      }),
    );
  });

  it('takes ids that are still on the device', () =>
    use({}, async (runner) => {
      const [ours, theirs] = [await read(runner, 20, 1), await read(runner, 20, 1)];
      const others = [await read(runner, 33, 2), await read(runner, 33, 2)] as const;
      using ids = runner.model.device.tensor('i32', ['token'], [1], new Int32Array([77]));
      const known: BatchEntry = { sequence: theirs, ids: [77], phase: 'decode' };
      for (let step = 0; step < 3; step += 1) {
        const entries: BatchEntry[] = [...answers([others[0]], step), { sequence: ours, ids, phase: 'decode' }];
        const logits = await recordedStep(runner, entries);
        expect(logits).toEqual(await unrecordedStep(runner, [...answers([others[1]], step), known]));
      }
    }));

  it('refuses what an unrecorded one refuses, and goes on', () =>
    use({}, async (runner) => {
      const sequence = await read(runner, 60, 1);
      const entries = answers([sequence], 1);
      await expect(runner.step([])).rejects.toThrow(InvalidValueError);
      await expect(runner.step([...entries, ...entries])).rejects.toThrow(InvalidValueError);
      await expect(runner.step([{ sequence, ids: [vocabulary], phase: 'decode' }])).rejects.toThrow(InvalidValueError);
      const twice = [runner.step(entries), runner.step(entries)] as const;
      (await twice[0]).dispose();
      await expect(twice[1]).rejects.toThrow(/position 60 of a sequence of 61 tokens/);
      expect(await recordedStep(runner, entries)).toHaveLength(vocabulary);
      expect(sequence.length).toBe(62);
    }));

  it('has no room where the cache has none; nothing is lost then', () =>
    use({ sequences: 2, cacheTokens: 64, contextTokens: 192 }, async (runner) => {
      const [first, second] = [await read(runner, 128, 1), await read(runner, 64, 2)];
      await expect(runner.step(answers([second], 1))).rejects.toThrow(OutOfMemoryError);
      expect(second.length).toBe(64);
      first.dispose();
      expect(await recordedStep(runner, answers([second], 1))).toHaveLength(vocabulary);
      expect(second.length).toBe(65);
    }));

  it('may be on its way when its runner is disposed; all memory is back then', async () => {
    await withRunner(needleModel, { kind, contextTokens }, async (_runner, model) => {
      const before = model.device.memory().live;
      const runner = model.createRunner({ contextTokens });
      const sequence = await read(runner, 100, 1);
      for (let step = 0; step < 8; step += 1) (await runner.step(answers([sequence], step))).dispose();
      runner.dispose();
      expect(await liveBytes(model.device, before)).toBe(before);
    });
  });
});

describe('a store whose tokens cease to be dense', () => {
  const dense = densePagedStore({ dtype: 'f32' });

  let longest = Infinity;

  /** Dense, but it says that its second layer is not, of sequences longer than `longest` tokens. */
  const ceasing: KvStoreFactory = {
    name: 'ceasing',
    create: (layers, capacity) =>
      dense.create(layers, capacity).map((store) => {
        const own: Partial<KvStore> = {
          decodeDense: (stream, call) => {
            store.startDecode(stream, call)();
          },
          denseBlocks: (slots = []) =>
            store.layer.index === 1 && slots.some((slot) => (store.lengths(slot)[0] ?? 0) > longest) ? undefined : store.denseBlocks(slots),
        };
        return new Proxy(store, {
          get(of, name) {
            const value: unknown = Reflect.get(own, name) ?? Reflect.get(of, name, of);
            return typeof value === 'function' ? (value.bind(of) as unknown) : value;
          },
        });
      }),
  };

  it('has steps recorded in two ways; sequences that are not in the step do not count', async () => {
    await withRunner(needleModel, { contextTokens, sequences: 2, policy: kvPolicy({ store: ceasing }) }, async (runner) => {
      await read(runner, 60, 2);
      const sequence = await read(runner, 40, 1);
      longest = 43;
      const recordings = countRecordings(runner);
      const { stream } = runner;
      const replay = stream.replay.bind(stream);
      const replayed: Recording[] = [];
      stream.replay = (recording) => {
        replayed.push(recording);
        replay(recording);
      };
      for (let step = 0; step < 6; step += 1) await recordedStep(runner, answers([sequence], step));
      expect(recordings()).toBe(2);
      const [first, last] = [replayed[0], replayed.at(-1)];
      expect(first).not.toBe(last);
      expect(replayed.map((recording) => recording === first)).toEqual([true, true, true, true, false, false]);
    });
  });
});

describe('a store that cannot be recorded', () => {
  const dense = densePagedStore({ dtype: 'f32' });

  /** Dense, but it brings bytes from the host in the middle of its decode step. */
  const crossing: KvStoreFactory = {
    name: 'crossing',
    create: (layers, capacity) =>
      dense.create(layers, capacity).map((store) => {
        const target = capacity.device.tensor('f32', ['value'], [1]);
        const startDecode: KvStore['startDecode'] = (stream, call) => {
          stream.write(target, new Float32Array(1));
          return store.startDecode(stream, call);
        };
        return new Proxy(store, {
          get(of, name) {
            if (name === 'startDecode') return startDecode;
            const value: unknown = Reflect.get(of, name, of);
            return typeof value === 'function' ? (value.bind(of) as unknown) : value;
          },
        });
      }),
  };

  it('is run operation by operation', async () => {
    const logits: Float32Array[] = [];
    for (const store of [crossing, dense]) {
      await withRunner(needleModel, { contextTokens, policy: kvPolicy({ store }) }, async (runner) => {
        const sequence = await read(runner, 40, 1);
        for (let step = 0; step < 3; step += 1) logits.push(await recordedStep(runner, answers([sequence], step)));
        expect(sequence.length).toBe(43);
      });
    }
    expect(logits.slice(0, 3)).toEqual(logits.slice(3));
  });
});
