import type { Stream } from '@kv/sparse-core';
import { liveBytes, Random } from '@kv/sparse-core/testing';
import { createEngine } from '@kv/serve-scheduler';
import { expect, it } from 'vitest';

import { describeInTwoMemories, mostRequests, optionsOf, promptOf, seed, sequences, settings } from './testing/two-memories.js';

const mostAborts = Number(process.env.KV_ENGINE_ABORTS ?? 24);
const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

describeInTwoMemories('an engine that is disturbed', (world, undisturbed) => {
  it.each([['device'], ['all']] as const)('requests that lose their memory (%s) give the tokens that they give undisturbed', async (memory) => {
    const random = new Random(2 + seed);
    let [tokens, preempted] = [0, 0];
    const { answers } = await world().serve({ policy: world().policyFor(3), layerSegments: memory === 'all', maxBatchRows: 512 }, (engine, open) => {
      tokens += 1;
      if (tokens % 5 > 0) return;
      engine.preempt(random.pick(open.slice(0, sequences)), memory);
      preempted += 1;
    });
    console.log(`${answers.filter((ids, index) => ids.join() === undisturbed().answers[index]?.join()).length} of ${mostRequests} the same, ${preempted} times preempted`);
    expect(preempted).toBeGreaterThan(mostRequests);
    expect(answers).toEqual(undisturbed().answers);
  });

  it('gives back what aborted requests hold, whatever is being copied for them, and others keep their answers', async () => {
    const random = new Random(3 + seed);
    // The device has what two answers read: every step loads blocks that others left.
    const engine = createEngine(world().model, { ...settings, policy: world().policyFor(2), layerSegments: true, maxBatchRows: 512 });
    const stages = { reading: 0, answering: 0 };
    const abort = async (index: number): Promise<void> => {
      const controller = new AbortController();
      const tokens = engine.generateTokens(promptOf(index), { ...optionsOf(index), maxTokens: 40, signal: controller.signal });
      const wanted = random.integer(0, 6);
      for (let taken = 0; taken < wanted; taken++) await tokens.next();
      for (let turns = random.integer(0, 12); turns > 0; turns--) await nextTurn();
      controller.abort(new Error('enough'));
      stages[wanted === 0 ? 'reading' : 'answering'] += 1;
      const rest = async (): Promise<void> => {
        while ((await tokens.next()).done !== true);
      };
      await expect(rest()).rejects.toThrow('enough');
    };
    let next = 0;
    const lanes = Array.from({ length: 4 }, async () => {
      while (next < mostAborts) await abort(next++);
    });
    const stays = async (index: number): Promise<number[]> => {
      const ids: number[] = [];
      for await (const { id } of engine.generateTokens(promptOf(seed + index), optionsOf(seed + index))) ids.push(id);
      return ids;
    };
    const answers = await Promise.all(Array.from({ length: mostRequests }, (_, index) => stays(index)));
    await Promise.all(lanes);
    console.log(`${mostAborts} aborted: ${JSON.stringify(stages)}`);
    expect(answers).toEqual(undisturbed().answers);
    while (engine.load.underWay + engine.load.waiting > 0) await nextTurn();
    expect(engine.runner.kvBytes).toEqual({ device: 0, host: 0 });
    await engine.close();
    const { device, live } = world();
    expect(await liveBytes(device, live)).toBe(live);
  });

  it('gives the same tokens however late any of its streams is', async () => {
    const random = new Random(4 + seed);
    const { device } = world();
    const streams: Stream[] = [];
    const createStream = device.createStream.bind(device);
    device.createStream = (options) => {
      const stream = createStream(options);
      streams.push(stream);
      return stream;
    };
    // A step takes about as long as some of these copies.
    using work = device.tensor('f32', ['copy', 'element'], [2, device.kind === 'cuda' ? 2 ** 24 : 200_000]);
    const [source, target] = [work.slice('copy', 0, 1), work.slice('copy', 1, 2)];
    let delays = 0;
    const { answers } = await world().serve({ policy: world().policyFor(2), layerSegments: true, maxBatchRows: 512 }, () => {
      if (random.next() < 0.7) return;
      const stream = random.pick(streams);
      for (let copies = random.integer(1, 30); copies > 0; copies--) stream.copy(source, target);
      delays += 1;
    });
    device.createStream = createStream;
    console.log(`${delays} delays on ${streams.length} streams`);
    expect(delays).toBeGreaterThan(mostRequests);
    expect(answers).toEqual(undisturbed().answers);
  });
});
