import { densePagedStore, kvPolicy } from '@kv/sparse-core';
import type { Device } from '@kv/sparse-core';
import { describeOnDeviceKinds, liveBytes, Random } from '@kv/sparse-core/testing';
import { Model } from '@kv/model';
import type { GeneratedId } from '@kv/model';
import { afterAll, beforeAll, expect, it } from 'vitest';

import { collect, needleModel, nextTurn, optionsOf, promptOf } from '../testing/engine-requests.js';
import { createEngine } from './engine.js';
import type { EngineOptions } from './engine-options.js';

/** Others are other requests and other moments. */
const seed = Number(process.env.KV_ENGINE_SEED ?? 0);
/** Requests of each run. */
const mostRequests = Number(process.env.KV_ENGINE_PREEMPTED ?? 16);

const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32', blockTokens: 16 }) });
const settings: EngineOptions = { policy, deterministic: true, activations: 'f32', sequences: 8, contextTokens: 256, maxBatchRows: 64, maxInjectTokens: 64 * 8 };

describeOnDeviceKinds('an engine that preempts', ({ open: openDevice }) => {
  let device: Device;
  let model: Model;
  let live: number;
  beforeAll(async () => {
    device = openDevice();
    model = await Model.open(needleModel, { device });
    ({ live } = device.memory());
  });
  afterAll(() => {
    model.dispose();
  });

  /** The answers of all requests, some of which lose their memory whenever so many tokens have come. */
  async function serve(options: EngineOptions, every: number, preempts: boolean): Promise<{ answers: number[][]; preempted: number }> {
    const engine = createEngine(model, { ...settings, ...options });
    const random = new Random(every + seed);
    const open = new Set<AsyncIterableIterator<GeneratedId>>();
    let [tokens, preempted] = [0, 0];
    const answer = async (index: number): Promise<number[]> => {
      const ids: number[] = [];
      const tokensOf = engine.generateTokens(promptOf((index + seed) % 60), optionsOf(index + seed));
      open.add(tokensOf);
      for await (const { id } of tokensOf) {
        ids.push(id);
        tokens += 1;
        if (!preempts || tokens % every > 0) continue;
        // Those that came first are under way: their prompts are read, or they answer.
        engine.preempt(random.pick([...open].slice(0, 8)), 'all');
        preempted += 1;
        await nextTurn();
      }
      open.delete(tokensOf);
      return ids;
    };
    const answers = await Promise.all(Array.from({ length: mostRequests }, (_, index) => answer(index)));
    expect(engine.runner.kvBytes).toEqual({ device: 0, host: 0 });
    await engine.close();
    expect(await liveBytes(device, live)).toBe(live);
    return { answers, preempted };
  }

  it.each([
    ['chunks', {}],
    ['layer segments', { layerSegments: true, maxInjectTokens: 128 }],
  ])('requests that lose their memory, with prompts in %s, give the tokens that they give undisturbed', async (_name, options) => {
    const { answers: undisturbed } = await serve(options, 1, false);
    const { answers, preempted } = await serve(options, 5, true);
    expect(preempted).toBeGreaterThan(mostRequests / 2);
    const same = answers.filter((ids, index) => ids.join() === undisturbed[index]?.join()).length;
    console.log(`${same} of ${mostRequests} the same, ${preempted} times preempted`);
    expect(answers).toEqual(undisturbed);
  });

  it('refuses to preempt what is no answer, and copies that are not on the device alone', async () => {
    const engine = createEngine(model, settings);
    const answer = engine.generateTokens(promptOf(1), optionsOf(1));
    expect(() => {
      engine.preempt([] as never, 'all');
    }).toThrow(/preempt: answer/);
    expect(() => {
      engine.preempt(answer, 'half' as never);
    }).toThrow(/preempt: memory/);
    await answer.next();
    expect(() => {
      engine.preempt(answer, 'device');
    }).toThrow(/has no copies in host memory/);
    expect((await collect(answer)).length).toBeGreaterThan(5);
    engine.preempt(answer, 'all');
    await engine.close();
  });
});
