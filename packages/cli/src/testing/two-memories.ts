import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { hostPool, kvPolicy } from '@kv/sparse-core';
import type { Device, HostPool, KvCapacity, KvLayer } from '@kv/sparse-core';
import { describeOnDeviceKinds, eventually, liveBytes } from '@kv/sparse-core/testing';
import { hierarchicalDeviceBytes, hierarchicalHostBytes, hierarchicalStore } from '@kv/hierarchical-kv';
import { Model } from '@kv/model';
import type { GeneratedId } from '@kv/model';
import { createEngine } from '@kv/serve-scheduler';
import type { Engine, EngineOptions, EngineRequestOptions } from '@kv/serve-scheduler';
import { afterAll, beforeAll, beforeEach, expect } from 'vitest';

import { needleModel } from './run-kv.js';

/** Others are other requests, and other moments. */
export const seed = Number(process.env.KV_ENGINE_SEED ?? 0);
export const mostRequests = Number(process.env.KV_ENGINE_PREEMPTED ?? 14);
const golden = JSON.parse(readFileSync(join(needleModel, 'golden.json'), 'utf8')) as { prompts: { ids: number[] }[] };
export const text = golden.prompts.flatMap(({ ids }) => ids);
export const blocks = { budgetTokens: 192, sinkTokens: 32, localWindow: 32, dtype: 'f32' } as const;
export const [sequences, contextTokens, mostKept] = [6, 512, 2];

export const settings: EngineOptions = { activations: 'f32', sequences, contextTokens, maxBatchRows: 128, deterministic: true };
export const promptOf = (index: number): number[] => text.slice((60 * index) % 3000, ((60 * index) % 3000) + 200 + ((index * 53) % 200));
export const optionsOf = (index: number): EngineRequestOptions => ({
  maxTokens: 10 + (index % 8),
  endIds: [],
  budgetTokens: index % 3 === 0 ? 160 : undefined,
  sampling: index % 4 === 0 ? { temperature: 0.8, seed: index } : { temperature: 0 },
});

export interface Served {
  readonly answers: number[][];
  readonly stats: Engine['stats'];
}

/** The small model on a device, and host memory for its caches. */
export class TwoMemories {
  readonly device: Device;
  readonly model: Model;
  readonly hostPool: HostPool;
  /** Bytes of the device while nothing is served. */
  readonly live: number;
  readonly #layers: readonly KvLayer[];

  static async open(device: Device): Promise<TwoMemories> {
    const model = await Model.open(needleModel, { device });
    const layers = Array.from({ length: model.config.layers }, (_, index) => ({ ...model.config, index }));
    const pool = await hostPool(device, { bytes: hierarchicalHostBytes(blocks, layers, capacityOf(device, mostKept)) });
    return new TwoMemories(model, layers, pool);
  }

  private constructor(model: Model, layers: readonly KvLayer[], pool: HostPool) {
    [this.device, this.model, this.hostPool, this.#layers] = [model.device, model, pool, layers];
    this.live = this.device.memory().live;
  }

  /** A policy whose device holds what steps of so many answers read. */
  policyFor(answers: number, keptPrompts = 0) {
    const deviceBytes = hierarchicalDeviceBytes(blocks, this.#layers, capacityOf(this.device, keptPrompts), answers);
    return kvPolicy({ store: hierarchicalStore({ ...blocks, deviceBytes, hostPool: this.hostPool }) });
  }

  /** The answers of `mostRequests` requests; `disturb` is called after each token. */
  async serve(options: EngineOptions, disturb?: (engine: Engine, open: AsyncIterableIterator<GeneratedId>[]) => void): Promise<Served> {
    const { live: before } = this.device.memory();
    const engine = createEngine(this.model, { ...settings, ...options });
    const open = new Set<AsyncIterableIterator<GeneratedId>>();
    const answer = async (index: number): Promise<number[]> => {
      const ids: number[] = [];
      const tokens = engine.generateTokens(promptOf(seed + index), optionsOf(seed + index));
      open.add(tokens);
      for await (const { id } of tokens) {
        ids.push(id);
        disturb?.(engine, [...open]);
      }
      open.delete(tokens);
      return ids;
    };
    const answers = await Promise.all(Array.from({ length: mostRequests }, (_, index) => answer(index)));
    const { stats } = engine;
    await engine.close();
    expect(await liveBytes(this.device, before)).toBe(before);
    return { answers, stats };
  }

  /** Waits for host memory that closed engines give back in the background: the next engine takes all of it. */
  async allReturned(): Promise<void> {
    const { hostPool: pool } = this;
    await eventually(() => pool.available === pool.byteLength);
    expect(pool.available).toBe(pool.byteLength);
  }

  [Symbol.dispose](): void {
    this.model.dispose();
    this.hostPool.dispose();
  }
}

function capacityOf(device: Device, keptPrompts: number): KvCapacity {
  const slots = sequences + keptPrompts;
  return { device, slots, tokensPerSlot: contextTokens, tokens: slots * contextTokens };
}

/** The same tests on every kind of device, with what requests answer there with all of their blocks on the device. */
export function describeInTwoMemories(subject: string, tests: (world: () => TwoMemories, undisturbed: () => Served) => void): void {
  describeOnDeviceKinds(subject, ({ open }) => {
    let [world, undisturbed]: [TwoMemories?, Served?] = [];
    beforeAll(async () => {
      world = await TwoMemories.open(open());
      undisturbed = await world.serve({ policy: world.policyFor(sequences) });
    });
    beforeEach(() => world?.allReturned());
    afterAll(() => world?.[Symbol.dispose]());
    const made = <Kind>(value: Kind | undefined): Kind => {
      if (value === undefined) throw new Error('it is made before the tests');
      return value;
    };
    tests(
      () => made(world),
      () => made(undisturbed),
    );
  });
}
