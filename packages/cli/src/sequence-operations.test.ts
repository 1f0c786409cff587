import { hbw, streaming } from '@kv/hbw-select';
import { hcAttentionStore } from '@kv/hcattn-quant';
import { hierarchicalHostBytes, hierarchicalStore } from '@kv/hierarchical-kv';
import { hieraSparsePrefill, hieraSparseStore } from '@kv/hierasparse';
import { generateTokens, Model, prefill } from '@kv/model';
import type { Runner } from '@kv/model';
import {
  CapabilityError,
  createDevice,
  densePagedStore,
  devices,
  hostPool,
  InvalidValueError,
  kvPolicy,
  QueueFullError,
} from '@kv/sparse-core';
import type { HostPool, KvPolicy } from '@kv/sparse-core';
import { endsUndense } from '@kv/sparse-core/native';
import { enqueuedFailure, enqueueFailure, liveBytes, Random } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { createPolicy, openPolicy } from '@kv/policies';
import { needleModel } from './testing/run-kv.js';
import { besideFresh, failingSelector, SequenceWorld } from './testing/sequence-world.js';

/** Of each policy. Thousands take minutes. */
const operations = Number(process.env.KV_SEQUENCE_OPERATIONS ?? 150);
const [sequences, contextTokens, blockTokens] = [6, 512, 64];
/** So little stays dense that prompts of a few hundred tokens have sparse blocks. */
const sparse = { localWindow: 64, sinkTokens: 64 };

/** The device has room for what three long sequences read, of six. */
const onHost = { dtype: 'f32', deviceBytes: 16_000_000, budgetTokens: contextTokens } as const;

async function poolOnHost({ device, config }: Model): Promise<HostPool> {
  const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
  const capacity = { device, slots: sequences, tokensPerSlot: contextTokens, tokens: 3 * contextTokens };
  return await hostPool(device, { bytes: hierarchicalHostBytes(onHost, layers, capacity) });
}

const policies: Record<string, (pool: HostPool | undefined) => KvPolicy> = {
  'dense f32': () => kvPolicy({ store: densePagedStore({ dtype: 'f32' }) }),
  dense: () => kvPolicy(),
  'hbw-1/4': () => createPolicy('hbw-1/4'),
  'snapkv-1/4': () => createPolicy('snapkv-1/4'),
  'halo-1/4': () => createPolicy('halo-1/4'),
  'single tokens': () => kvPolicy({ select: hbw({ keepRatio: 1 / 2, remainder: 'drop', headFloor: 0.5 }) }),
  streaming: () => kvPolicy({ select: streaming({ capacity: 100 }) }),
  'sparse prompts': () =>
    kvPolicy({ prefill: hieraSparsePrefill({ values: 1 }), store: hieraSparseStore({ values: 1, ...sparse }) }),
  'sparse after prompts': () => kvPolicy({ store: hieraSparseStore({ keys: 0.5, values: 1, ...sparse }) }),
  'sparse after a selection': () =>
    kvPolicy({ select: hbw({ keepRatio: 3 / 4 }), store: hieraSparseStore({ keys: 1, values: 1, ...sparse }) }),
  'blocks on the host f32': (pool) => kvPolicy({ store: hierarchicalStore({ ...onHost, hostPool: pool }) }),
  'blocks on the host after a selection': (pool) => kvPolicy({ select: hbw({ keepRatio: 1 / 2 }), store: hierarchicalStore({ ...onHost, hostPool: pool }) }),
  'codes of prompts': () => createPolicy('int8'),
  'codes after prompts': () => kvPolicy({ store: hcAttentionStore({ keys: 'int4', values: 'int8', valuesOn: 'device', localWindow: 0 }) }),
};

/** Those that load something of the model. */
const loaded: Record<string, string> = { 'vector codes of prompts': 'hcattn-1/4' };

type Operation = (world: SequenceWorld, fresh: Runner, isExact: boolean) => Promise<void> | void;

const plain: Record<string, Operation> = {
  open(world) {
    const { runner, random } = world;
    if (world.all.size === sequences) {
      expect(() => runner.openSequence()).toThrow(QueueFullError);
      world.count('open', 'QueueFullError');
      return;
    }
    const failing = random.next() < 0.15;
    if (failing && !world.canSelect) {
      expect(() => runner.openSequence({ select: failingSelector(random) })).toThrow(CapabilityError);
      world.count('open', 'CapabilityError');
      return;
    }
    world.add(runner.openSequence(failing ? { select: failingSelector(random) } : {}), { ids: [], failing });
    world.count('open', 'done');
  },
  async fork(world) {
    const one = world.pick();
    if (one === undefined || world.all.size === sequences) return;
    await world.attempt('fork', [one], () => {
      world.add(world.runner.fork(one.sequence), one);
      return Promise.resolve();
    });
  },
  dispose(world) {
    const one = world.pick();
    if (one) world.remove(one);
    world.count('dispose', 'done');
  },
  /** A prompt in chunks, possibly aborted. */
  async prefill(world) {
    const { runner, random } = world;
    const one = world.pick();
    if (one === undefined || world.room(one) < 2) return;
    const prompt = world.tokens(Math.min(240, world.room(one) - 1));
    const aborting = new AbortController();
    const aborts = random.next() < 0.2;
    const chunkTokens = random.integer(8, runner.maxBatchRows);
    const options = {
      chunkTokens,
      endsPrompt: random.next() < 0.6,
      signal: aborting.signal,
      onProgress: () => {
        if (aborts) aborting.abort();
      },
    };
    const before = one.ids.length;
    await world.attempt('prefill', [one], async () => {
      try {
        (await prefill(runner, one.sequence, prompt, options)).dispose();
      } catch (error) {
        if (error !== aborting.signal.reason) throw error;
        world.count('prefill', 'aborted');
      } finally {
        // What was cut off is there as far as it was read.
        if (!one.sequence.disposed) one.ids.push(...prompt.slice(0, one.sequence.length - before));
        if (one.ids.length > before) one.promptEnd = one.ids.length;
      }
    });
  },
  /** A prompt in segments, with an answer's step or a wait in host memory between them, possibly given up. */
  async segments(world) {
    const { runner, random } = world;
    const one = world.pick();
    if (one === undefined || world.room(one) < 2) return;
    const ids = world.tokens(Math.min(240, world.room(one) - 1));
    const phase = random.next() < 0.6 ? 'prefill-end' : 'prefill';
    const isGivenUp = random.next() < 0.2;
    using batch = runner.createBatch([{ sequence: one.sequence, ids, phase }]);
    runner.embed(batch);
    const { layers } = runner.model.config;
    const isRead = (): boolean => batch.nextLayer === layers;
    await world.attempt('segments', [one], async () => {
      while (!isRead() && !(isGivenUp && batch.nextLayer > 2)) {
        await runner.runSegment(batch, random.integer(batch.nextRows, 400));
        if (random.next() < 0.2) await runner.moveToHost(batch);
        const other = world.pick();
        if (other === undefined || other === one || other.ids.length === 0 || world.room(other) < 40) continue;
        await world.attempt('step between segments', [other], async () => {
          await world.step([{ one: other, ids: [world.token()], phase: 'decode' }]);
        });
      }
    });
    if (!world.all.has(one)) return;
    if (isRead()) {
      one.ids.push(...ids);
      one.promptEnd = one.ids.length;
    } else {
      world.count('segments', 'given up');
      world.remove(one);
    }
  },
  async evict(world) {
    const one = world.pick();
    if (one === undefined) return;
    try {
      world.runner.evict(one.sequence);
      world.count('evict', 'done');
    } catch (error) {
      expect(error).toBeInstanceOf(CapabilityError);
      world.count('evict', 'CapabilityError');
    }
    await world.runner.stream.synchronize();
  },
  /** Chunks of prompts and tokens of answers of several sequences at once; some of the tokens are none. */
  async step(world) {
    const { runner, random } = world;
    const chosen = [...world.all].filter((one) => random.next() < 0.7 && world.room(one) > 40);
    const onlyAnswers = random.next() < 0.5;
    const entries = chosen.map((one) => {
      const isAnswer = one.ids.length > 0 && (onlyAnswers || random.next() < 0.5);
      const ids = isAnswer ? [random.next() < 0.03 ? -1 : world.token()] : world.tokens(runner.maxBatchRows / sequences);
      const phase = isAnswer ? 'decode' : random.next() < 0.5 ? 'prefill' : 'prefill-end';
      return { one, ids, phase } as const;
    });
    if (entries.length === 0) return;
    await world.attempt('step', chosen, async () => {
      const rows = await world.step(entries);
      entries.forEach(({ one }, row) => {
        if (one.sequence.disposed) return;
        // Whoever was fed no token has no scores, until a selection drops what came of it; nobody else notices.
        const isFinite = rows[row]?.every(Number.isFinite);
        if (!one.broken || world.keepsAll) expect(isFinite).toBe(!one.broken);
        if (!isFinite) world.count('step', 'a row of NaN');
      });
    });
  },
  /** An answer that ends by length, by an end token, by a loop that is left or by an abort. */
  async generate(world) {
    const { runner, random } = world;
    const one = world.pick();
    if (one === undefined || world.room(one) < 24) return;
    const prompt = world.tokens(12);
    const aborting = new AbortController();
    const way = random.pick(['length', 'end', 'break', 'abort'] as const);
    const at = random.integer(1, 5);
    const options = { sequence: one.sequence, maxTokens: 6, endIds: [] as number[], signal: aborting.signal };
    const [before, seen] = [one.ids.length, [] as number[]];
    await world.attempt(`generate, ${way}`, [one], async () => {
      try {
        for await (const { id } of generateTokens(runner, prompt, options)) {
          seen.push(id);
          if (seen.length < at) continue;
          if (way === 'break') break;
          if (way === 'end') options.endIds.push(...Array(4096).keys());
          if (way === 'abort') aborting.abort();
        }
      } catch (error) {
        const noToken = one.broken && error instanceof InvalidValueError;
        if (error !== aborting.signal.reason && !noToken) throw error;
        if (noToken) world.count('generate', 'no token');
      } finally {
        if (!one.sequence.disposed) {
          const held = seen.length > 0 ? prompt.length : one.sequence.length - before;
          one.ids.push(...prompt.slice(0, held), ...seen);
          if (held > 0) one.promptEnd = before + held;
        }
      }
    });
  },
  async truncate(world) {
    const one = world.pick();
    if (one === undefined) return;
    const length = world.random.integer(one.promptEnd, one.ids.length);
    try {
      world.runner.truncate(one.sequence, length);
      one.ids.length = length;
      one.broken = one.ids.includes(-1);
      world.count('truncate', 'done');
    } catch (error) {
      expect(error).toBeInstanceOf(CapabilityError);
      world.count('truncate', 'CapabilityError');
    }
    await world.runner.stream.synchronize();
  },
  /** Calls that are wrong change nothing. */
  async refused(world, fresh) {
    const { runner } = world;
    using foreign = fresh.openSequence();
    const one = world.pick();
    const wrong: (() => Promise<unknown>)[] = [
      () => runner.step([{ sequence: foreign, ids: [5], phase: 'prefill' }]),
      () => prefill(runner, foreign, [5]),
      () => generateTokens(runner, [5], { sequence: foreign }).next(),
    ];
    if (one) {
      const { sequence, ids } = one;
      wrong.push(
        () => runner.step([{ sequence, ids: [4096], phase: 'decode' }]),
        () => runner.step([{ sequence, ids: [5], phase: 'prefill' }, { sequence, ids: [5], phase: 'decode' }]),
        () => prefill(runner, sequence, new Array<number>(contextTokens + 1 - ids.length).fill(5)),
        () => generateTokens(runner, [-1], { sequence }).next(),
      );
    }
    for (const call of wrong) {
      await expect(call()).rejects.toThrow(InvalidValueError);
      world.count('a wrong call', 'InvalidValueError');
    }
  },
  /** An operation fails the stream, perhaps behind a step that nobody has waited for: that sequence ends, no other. */
  async fail(world) {
    const { runner } = world;
    await runner.stream.synchronize();
    const one = world.random.next() < 0.5 ? world.pick() : undefined;
    if (one !== undefined && world.room(one) > 0 && one.ids.length > 0) {
      await world.attempt('fail', [one], async () => {
        (await runner.step([{ sequence: one.sequence, ids: [world.token()], phase: 'decode' }])).dispose();
      });
      // A step without room leaves nothing that could be lost, once the stream has come by.
      if (one.sequence.length === one.ids.length) await runner.stream.synchronize();
    }
    const lost = [...world.all].filter((each) => each === one && each.sequence.length > each.ids.length);
    enqueueFailure(runner.stream);
    await expect(runner.stream.synchronize()).rejects.toThrow(enqueuedFailure);
    for (const each of [...world.all].filter(({ sequence }) => sequence.disposed)) {
      const isLost = lost.includes(each);
      // Its own selection may have failed only now.
      expect(isLost || each.failing).toBe(true);
      if (isLost) expect(each.sequence.failure?.message).toMatch(enqueuedFailure);
      world.all.delete(each);
    }
    expect(lost.filter((each) => world.all.has(each))).toEqual([]);
    world.count('fail', `${lost.length} ended`);
  },
  /** Its logits are those of a fresh run of its tokens, where the policy keeps them all. */
  async compare(world, fresh, isExact) {
    const one = world.pick();
    if (one === undefined || !isExact || one.broken || one.ids.length === 0 || world.room(one) === 0) return;
    await world.attempt('compare', [one], async () => {
      const [ours, wanted] = await besideFresh(world, one, fresh);
      // Other chunks take other kernels, whose f32 sums run in another order; the logits reach 22.
      expect(Math.max(...wanted.map((value, index) => Math.abs(value - (ours[index] ?? NaN))))).toBeLessThan(1e-3);
    });
  },
};

/** The first steps of answers of so many sequences make their recordings, which stay. */
async function recordSteps(runner: Runner, most: number): Promise<void> {
  const opened = Array.from({ length: most }, () => runner.openSequence());
  for (const sequence of opened) (await runner.step([{ sequence, ids: [5], phase: 'prefill-end' }])).dispose();
  for (let count = 1; count <= most; count += 1) {
    const answers = opened.slice(0, count).map((sequence) => ({ sequence, ids: [5], phase: 'decode' }) as const);
    (await runner.step(answers)).dispose();
  }
  for (const sequence of opened) sequence.dispose();
}

/** By how often they are drawn. */
const weights: Record<keyof typeof plain, number> = {
  ...{ open: 5, fork: 3, dispose: 2, prefill: 5, step: 8, generate: 6, segments: 4, evict: 1, truncate: 2, refused: 1, fail: 1, compare: 3 },
};
const drawn = Object.entries(weights).flatMap(([name, weight]) => new Array<string>(weight).fill(name));

describe.each(['cpu', 'cuda'] as const)('random operations on sequences on %s', (kind) => {
  const run = async (name: string, seed: number): Promise<void> => {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    const isDense = name.startsWith('dense');
    using opened = await openPolicy(loaded[name] ?? 'dense', model, { sequences, contextTokens });
    const pool = name.startsWith('blocks on the host') ? await poolOnHost(model) : undefined;
    const policy = policies[name]?.(pool) ?? opened.policy;
    const options = { contextTokens, maxBatchRows: 128, activations: 'f32' } as const;
    // CUDA attends over sparse blocks with rows of their dtype: those of the weights, its default.
    const activations = kind === 'cuda' && name.startsWith('sparse') ? undefined : options.activations;
    using runner = model.createRunner({ ...options, activations, policy, sequences, cacheTokens: 3 * contextTokens });
    pool?.dispose();
    using fresh = model.createRunner({ ...options, policy: kvPolicy({ store: densePagedStore({ dtype: 'f32' }) }) });
    const world = new SequenceWorld(runner, new Random(seed), { keepsAll: policy.select === undefined, canSelect: endsUndense.of(policy.prefill) === undefined });
    await recordSteps(runner, sequences);
    await recordSteps(fresh, 1);
    await runner.stream.synchronize();
    await fresh.stream.synchronize();
    const before = model.device.memory();
    const { layers, kvHeads, headDim } = model.config;
    const blockBytes = layers * kvHeads * 2 * blockTokens * headDim * (name === 'dense' ? 2 : 4);
    for (let index = 0; index < operations; index += 1) {
      await plain[world.random.pick(drawn)]?.(world, fresh, name.endsWith(' f32'));
      world.expectHolds();
      if (!isDense) continue;
      const bytes = [...world.all].map(({ ids }) => Math.ceil(ids.length / blockTokens) * blockBytes);
      expect([...world.all].map(({ sequence }) => runner.kvBytesOf(sequence).device)).toEqual(bytes);
      // Forks share blocks.
      expect(runner.kvBytes.device).toBeLessThanOrEqual(bytes.reduce((sum, each) => sum + each, 0));
    }
    for (const one of [...world.all]) world.remove(one);
    // Those of a stream that failed went with it.
    await recordSteps(runner, sequences);
    await runner.stream.synchronize();
    expect(runner.kvBytes).toEqual({ device: 0, host: 0 });
    expect(await liveBytes(model.device, before.live)).toBe(before.live);
    const after = model.device.memory();
    expect(after.finalized).toBe(before.finalized);
    if (process.env.KV_SEQUENCE_OPERATIONS !== undefined) console.log(name, Object.fromEntries([...world.outcomes].sort()));
  };

  it.skipIf(!devices().includes(kind)).each([...Object.keys(policies), ...Object.keys(loaded)].map((name, index) => [name, index] as const))(
    'leave each with its own tokens, and no memory behind: %s',
    (name, index) => run(name, 100 + index),
    600_000,
  );
});
