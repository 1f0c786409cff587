import { createDevice, KvError, OutOfMemoryError } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import { Model } from '../model.js';
import { goldenModel } from '../testing/golden.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { BatchEntry } from './batch-entry.js';

const memoryLimit = 2 ** 28;

describeOnEachKind('a step for which the device has no room', (kind) => {
  it.each(['createBatch', 'a recorded step', 'head'] as const)('leaves nothing behind in %s', async (what) => {
    using model = await Model.open(goldenModel('mistral'), { device: createDevice({ kind, threads: 2, memoryLimit }) });
    const { device } = model;
    using runner = model.createRunner({ sequences: 3, contextTokens: 64 });
    const [reading, answering] = [runner.openSequence(), runner.openSequence()];
    const answers: BatchEntry[] = [{ sequence: answering, ids: [5], phase: 'decode' }];
    // The first step of answers makes its recording.
    (await runner.step([{ sequence: answering, ids: [1, 2, 3], phase: 'prefill-end' }])).dispose();
    (await runner.step(answers)).dispose();
    using onDevice = device.tensor('i32', ['token'], [1], new Int32Array([5]));
    using whole = runner.createBatch([{ sequence: runner.openSequence(), ids: [1, 2], phase: 'prefill' }]);
    runner.embed(whole);
    await runner.runLayers(whole, 0, model.config.layers);
    const calls = {
      createBatch: () =>
        runner.createBatch([
          { sequence: reading, ids: [1, 2, 3], phase: 'prefill' },
          { sequence: answering, ids: onDevice, phase: 'decode' },
        ]),
      'a recorded step': () => runner.step(answers),
      head: () => runner.head(whole),
    };
    await runner.stream.synchronize();
    const { finalized } = device.memory();
    const fitsIn = async (room: number): Promise<boolean> => {
      const { live, limit } = device.memory();
      const filler = device.tensor('u8', ['byte'], [limit - live - room]);
      const before = device.memory().live;
      try {
        using made = await calls[what]();
        expect(made).toBeDefined();
        return true;
      } catch (error) {
        expect(error).toBeInstanceOf(OutOfMemoryError);
        // What is enqueued holds its tensors until it is done.
        await runner.stream.synchronize();
        expect(device.memory().live).toBe(before);
        return false;
      } finally {
        filler.dispose();
      }
    };
    // Room for the first allocation, then for the first two, and so on.
    let room = 0;
    while (!(await fitsIn(room))) room += 4;
    expect(room).toBeGreaterThan(4);
    expect(device.memory().finalized).toBe(finalized);
  });
});

it.each([2 ** 31 - 1, 2 ** 31, 1e15])('a runner of %d sequences is refused at once', async (sequences) => {
  using model = await Model.open(goldenModel('mistral'), { device: createDevice({ threads: 1 }) });
  const before = process.memoryUsage().rss;
  for (const contextTokens of [1, 4096]) {
    expect(() => model.createRunner({ sequences, contextTokens })).toThrow(KvError);
    expect(() => model.createRunner({ sequences, contextTokens, cacheTokens: 64 })).toThrow(KvError);
  }
  expect(process.memoryUsage().rss - before).toBeLessThan(2 ** 28);
});
