import { CapabilityError, densePrefill, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import type { PrefillAttention } from '@kv/sparse-core';
import { enqueuedFailure, enqueueFailure, liveBytes } from '@kv/sparse-core/testing';
import { hierarchicalStore } from '@kv/hierarchical-kv';
import { hieraSparsePrefill } from '@kv/hierasparse';
import { hcAttentionPrefill, hcAttentionStore } from '@kv/hcattn-quant';
import { skeletonPrefill } from '@kv/skeleton-prefill';
import { openPolicy } from '@kv/policies';
import { createEngine } from '@kv/serve-scheduler';
import type { Engine, EngineRequestOptions } from '@kv/serve-scheduler';
import { expect, it } from 'vitest';

import { blocks, contextTokens, describeInTwoMemories, mostKept, promptOf, sequences, settings, text } from './testing/two-memories.js';


describeInTwoMemories('an engine with blocks in two memories', (world, undisturbed) => {
  it('admits answers by what they read, and none is ever refused by the store', async () => {
    expect(undisturbed().stats).toMatchObject({ split: 0 });
    // The device has what two answers read.
    const few = await world().serve({ policy: world().policyFor(2) });
    expect(few.answers).toEqual(undisturbed().answers);
    expect(few.stats.split).toBe(0);
    expect(few.stats.blocksLoaded).toBeGreaterThan(0);
    expect(few.stats.blocksFound).toBeGreaterThan(few.stats.blocksLoaded);
    expect(few.stats.steps).toBeGreaterThan(1.2 * undisturbed().stats.steps);
  });

  it('reads the least computed request again when host memory is full, and feeds its answer again', async () => {
    const { answers, stats } = await world().serve({ policy: world().policyFor(sequences), cacheTokens: 1000, reservedAnswerTokens: 0 });
    expect(answers).toEqual(undisturbed().answers);
    expect(stats.restarts).toBeGreaterThan(0);
  });

  it('keeps prompts in host memory for others that begin with the same tokens', async () => {
    const { answers, stats } = await world().serve({ policy: world().policyFor(3, mostKept), keptPrompts: mostKept });
    expect(answers).toEqual(undisturbed().answers);
    const engine = createEngine(world().model, { ...settings, policy: world().policyFor(3, mostKept), keptPrompts: mostKept });
    const ask = async (question: number[]) => {
      const ids: number[] = [];
      for await (const { id } of engine.generateTokens([...text.slice(0, 384), ...question], { maxTokens: 8, endIds: [] })) ids.push(id);
      return ids;
    };
    const first = await ask([1, 2, 3]);
    await ask([4, 5]);
    expect(await ask([1, 2, 3])).toEqual(first);
    expect(engine.stats.reusedTokens).toBe(768);
    expect(stats.reusedTokens).toBe(0);
    await engine.close();
  });

  it('refuses what cannot be served, by name, before anything is made', async () => {
    const tight = kvPolicy({ store: hierarchicalStore({ ...blocks, deviceBytes: 10_000 }) });
    expect(() => createEngine(world().model, { ...settings, policy: tight })).toThrow(OutOfMemoryError);
    expect(await liveBytes(world().device, world().live)).toBe(world().live);
  });

  it('refuses requests that could never be served, and goes on', async () => {
    const engine = createEngine(world().model, { ...settings, policy: world().policyFor(1), cacheTokens: 300 });
    const wrong: [new (message: string) => Error, readonly number[], EngineRequestOptions][] = [
      [InvalidValueError, [1], { budgetTokens: 95 }],
      [InvalidValueError, [1], { budgetTokens: 193 }],
      [InvalidValueError, [1], { budgetTokens: NaN }],
      // 16 blocks of a head, and six that sequences may leave partly filled.
      [OutOfMemoryError, text.slice(0, 500), { maxTokens: 13 }],
    ];
    for (const [kind, prompt, options] of wrong) expect(() => engine.generateTokens(prompt, options), JSON.stringify(options)).toThrow(kind);
    expect(engine.load).toEqual({ underWay: 0, waiting: 0 });
    const dense = createEngine(world().model, settings);
    expect(() => dense.generateTokens([1], { budgetTokens: 160 })).toThrow(CapabilityError);
    await Promise.all([engine.close(), dense.close()]);
  });

  it.each([
    [hieraSparsePrefill(), /needs the capability 'hierasparse: .*which 'hierarchical 192' lacks/],
    [hcAttentionPrefill(), /needs the capability 'hcattn: .*which 'hierarchical 192' lacks/],
    [skeletonPrefill({ budget: 0.5 }), /The prefill 'skeleton.*' reads dense blocks, which the store 'hierarchical 192' does not keep/],
  ])('refuses a policy whose prompts the store cannot hold, by name, when the engine is made (%#)', async (prefill, message) => {
    const policy = kvPolicy({ ...world().policyFor(2), prefill });
    expect(() => createEngine(world().model, { ...settings, policy })).toThrow(CapabilityError);
    expect(() => createEngine(world().model, { ...settings, policy })).toThrow(message);
    expect(await liveBytes(world().device, world().live)).toBe(world().live);
  });

  it('refuses prompts of HieraSparse over a cache of codes, by name, when the engine is made', () => {
    const store = hcAttentionStore({ keys: 'int8', values: 'int8', valuesOn: 'device' });
    const policy = kvPolicy({ prefill: hieraSparsePrefill(), store });
    expect(() => createEngine(world().model, { ...settings, deterministic: false, policy })).toThrow(/needs the capability 'hierasparse: .*which 'hcattn.*' lacks/);
  });

  it('refuses to keep prompts in host memory that was opened for the sequences alone', async () => {
    const opened = await openPolicy('offload-1/4', world().model, { sequences: 2, contextTokens });
    const { device } = world();
    const { live: before } = device.memory();
    const wanted = { policy: opened.policy, sequences: 2, contextTokens };
    expect(() => createEngine(world().model, { ...wanted, keptPrompts: 1 })).toThrow(OutOfMemoryError);
    expect(() => createEngine(world().model, { ...wanted, keptPrompts: 1 })).toThrow(/host/);
    expect(await liveBytes(device, before)).toBe(before);
    await createEngine(world().model, wanted).close();
    opened[Symbol.dispose]();
  });

  it('goes on with another runner in the same host memory when a stream failed', async () => {
    const opened = await openPolicy('offload-1/4', world().model, { sequences: 2, contextTokens });
    /** A prompt of 33 tokens fails its stream. */
    const prefill: PrefillAttention = {
      name: 'sometimes failing',
      attend(stream, call) {
        if (call.batch.rows === 33) enqueueFailure(stream);
        return densePrefill().attend(stream, call);
      },
    };
    const engine = createEngine(world().model, { policy: kvPolicy({ ...opened.policy, prefill }), sequences: 2, contextTokens });
    const first = await firstTokens(engine);
    for (let failures = 0; failures < 3; failures++) {
      await expect(engine.generateTokens(text.slice(0, 33), { endIds: [] }).next()).rejects.toThrow(enqueuedFailure);
      expect(await firstTokens(engine)).toEqual(first);
    }
    await engine.close();
    opened[Symbol.dispose]();
  });
});

async function firstTokens(engine: Engine): Promise<number[]> {
  const ids: number[] = [];
  for await (const { id } of engine.generateTokens(promptOf(3), { maxTokens: 4, endIds: [] })) ids.push(id);
  return ids;
}
