import {
  CapabilityError,
  createDevice,
  createRowBatch,
  densePagedStore,
  densePrefill,
  hostPool,
  InvalidValueError,
  kvPolicy,
  type KvStore,
  OutOfMemoryError,
  ropeDescription,
} from '@kv/sparse-core';
import { describeOnDeviceKinds, enqueuedFailure, enqueueFailure, HeldRows, liveBytes, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { hcAttentionPrefill } from './hc-attention-prefill.js';
import { hcAttentionHostBytes, hcAttentionStore } from './hc-attention-store.js';
import { quantizedPrompts } from './quantized-prompts.js';
import { quantizedOracle } from './testing/block-oracles.js';
import { codedLayer, codedRun, type CodedSettings, codedStores } from './testing/coded-run.js';
import { HeadOracle } from './testing/head-oracle.js';

const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const quantize = (head: HeadOracle) => head.quantize();
const finish = (head: HeadOracle) => {
  head.finished = true;
  head.quantize();
};

/** The next rows of prompts, each at the end of its slot, held to the oracle. */
async function read(steps: StoreRun<HeadOracle>, rowsOf: Readonly<Record<number, number>>) {
  const entries = Object.entries(rowsOf).map(([slot, rows]) => ({ slot: Number(slot), position: steps.heads[Number(slot)]?.[0]?.count ?? 0, rows }));
  for (const head of steps.heads.flat()) head.readsPrompt = true;
  await steps.check(entries, 'prefill');
  for (const head of steps.heads.flat()) head.readsPrompt = false;
  for (const { slot } of entries) steps.heads[slot]?.forEach(quantize);
}

function expectBytes(steps: StoreRun<HeadOracle>) {
  const heads = steps.heads.flat().map((head) => head.bytes());
  const sum = (numbers: readonly number[]) => numbers.reduce((total, number) => total + number, 0);
  expect(steps.store.bytes()).toEqual({ device: sum(heads.map(({ device }) => device)), host: sum(heads.map(({ host }) => host)) });
}

/** Attends to rows of random queries over what a slot holds by then. */
async function answer(steps: StoreRun<HeadOracle>, slot: number) {
  await steps.check(chunk(slot, steps.heads[slot]?.[0]?.count ?? 0, 1), 'decode', quantize);
}

describeOnDeviceKinds('prompts that pass through host memory', ({ open }: TestDevice) => {
  const run = (settings: Partial<CodedSettings> = {}) => codedRun(open(), { prefill: hcAttentionPrefill(), ...settings });

  it.each([
    { localWindow: 0, sinkTokens: 0, values: 'f16' },
    { localWindow: 70, sinkTokens: 4, values: 'int8' },
  ] as const)('are read as dense ones are, ragged and in turns: $localWindow, $sinkTokens, $values', async (options) => {
    const steps = await run({ ...options, codebooks: { groups: 8, centroids: 4 } });
    await read(steps, { 0: 1, 1: 333 });
    await read(steps, { 0: 130, 1: 1, 2: 64 });
    // Several pieces of each sequence, of unequal lengths.
    await read(steps, { 0: 200, 1: 250, 2: 7 });
    expectBytes(steps);
    await read(steps, { 0: 300 });
    await read(steps, { 1: 111, 0: 1, 2: 90 });
    expectBytes(steps);
    steps.finishPrefill(1, finish);
    expectBytes(steps);
    await answer(steps, 1);
    // An answer amid others' prompts, and then a second prompt over codes.
    await read(steps, { 0: 65, 2: 400 });
    await read(steps, { 1: 100, 2: 30 });
    for (const slot of [0, 2]) steps.finishPrefill(slot, finish);
    for (const slot of [0, 1, 2]) await answer(steps, slot);
    expectBytes(steps);
    for (const slot of [0, 1, 2]) steps.release(slot);
    expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
    steps.store.dispose();
  });

  it('differ from those of the dense store by less than an element rounds', async () => {
    const device = open();
    const [store] = densePagedStore({ dtype: 'f16' }).create([codedLayer], { device, slots: 3, tokensPerSlot: 1024, tokens: 3072 }) as [KvStore];
    const dense = new StoreRun(store, densePrefill(), { device, random: new Random(1), dtype: 'f16', slots: 3, group: 2 }, () => new HeldRows('f16', 64));
    const streamed = await run({ codebooks: { groups: 8, centroids: 2 }, localWindow: 0 });
    for (const [position, rows] of [[0, 200], [200, 500], [700, 150]] as const) {
      const [exact, ours] = [await dense.step(chunk(1, position, rows), 'prefill'), await streamed.step(chunk(1, position, rows), 'prefill')];
      const most = exact.reduce((largest, number, index) => Math.max(largest, Math.abs(number - (ours[index] ?? NaN))), 0);
      expect(most).toBeLessThan(2 ** -10);
    }
  });

  it('may be forked and cut while they are read', async () => {
    const steps = await run({ localWindow: 32, values: 'int8' });
    await read(steps, { 0: 400 });
    steps.copy(0, 1);
    steps.copy(0, 2, 290);
    expect(steps.store.bytes([1])).toEqual(steps.store.bytes([0]));
    await read(steps, { 0: 90, 1: 200, 2: 300 });
    steps.finishPrefill(0, finish);
    // What a fork reads is still on the host.
    await read(steps, { 1: 64 });
    steps.release(2);
    await answer(steps, 0);
    await read(steps, { 1: 10 });
    steps.finishPrefill(1, finish);
    for (const slot of [0, 1]) await answer(steps, slot);
    for (const slot of [0, 1]) steps.release(slot);
    expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
  });

  it('answer from codes before they are complete', async () => {
    const steps = await run({ localWindow: 0 });
    await read(steps, { 0: 300 });
    for (let step = 0; step < 3; step++) await answer(steps, 0);
    await read(steps, { 0: 200 });
    expectBytes(steps);
  });

  it('of many layers share the dense room of a step', async () => {
    const layers = Array.from({ length: 6 }, (_, index) => ({ ...codedLayer, index }));
    const settings = { prefill: hcAttentionPrefill(), sinkTokens: 0, localWindow: 0 };
    const bytesOf = async (count: number) => {
      const { stores } = await codedStores(open(), layers.slice(0, count), settings);
      const bytes = stores.reduce((sum, store) => sum + store.reserved().device, 0);
      for (const store of stores) store.dispose();
      return bytes;
    };
    const rowBytes = 700 * 2 * 2 * 64 * 2;
    expect(((await bytesOf(6)) - (await bytesOf(1))) / 5).toBeLessThan(rowBytes);
  });

  it('find in each layer the room that was promised for all, or are refused before the first', async () => {
    const device = open();
    const layers = Array.from({ length: 4 }, (_, index) => ({ ...codedLayer, index }));
    const prefill = hcAttentionPrefill();
    // Less than what all sequences may hold, so that room runs out.
    const { stores } = await codedStores(device, layers, { prefill, localWindow: 64, capacity: { tokens: 512, batchRows: 512 } });
    const random = new Random(2);
    const runs = stores.map((store) => new StoreRun(store, prefill, { device, random, dtype: 'f16', slots: 3, group: 2 }, () => new HeldRows('f16', 64)));
    const [first] = runs as [StoreRun<HeldRows>];
    let refused = 0;
    for (let step = 0; step < 40; step++) {
      const entries = [0, 1, 2].flatMap((slot) => {
        const [held = 0] = first.store.lengths(slot);
        const rows = Math.min(random.pick([0, 1, 2, 70, 200, 400]), 1024 - held);
        return rows > 0 ? [{ slot, position: held, rows }] : [];
      });
      const rows = entries.reduce((sum, each) => sum + each.rows, 0);
      if (rows === 0 || rows > 512) continue;
      using batch = createRowBatch(device, first.stream, entries);
      const prepared: KvStore[] = [];
      try {
        for (const { store, stream } of runs) {
          store.prepare(stream, batch);
          prepared.push(store);
        }
      } catch (error) {
        expect(error).toBeInstanceOf(OutOfMemoryError);
        refused += 1;
        runs.forEach(({ store, stream }) => {
          for (const { slot } of entries) store.truncate(stream, slot, 0);
        });
        for (const run of runs) run.release(step % 3);
        continue;
      }
      // Each layer prepares again, which changes nothing.
      for (const run of runs) await run.step(entries, 'prefill');
    }
    expect(refused).toBeGreaterThan(3);
    for (const run of runs) for (const slot of [0, 1, 2]) run.release(slot);
    for (const { store } of runs) expect(store.bytes()).toEqual({ device: 0, host: 0 });
  });

  it('go on behind a stream that failed, on the one in its place', async () => {
    const steps = await run({ localWindow: 0 });
    await read(steps, { 0: 400, 1: 300 });
    enqueueFailure(steps.stream);
    await expect(steps.step(chunk(0, 400, 200), 'prefill')).rejects.toThrow(enqueuedFailure);
    const other = steps.stream.device.createStream();
    other.waitFor(steps.stream, { takesFailure: false });
    steps.stream.dispose();
    Object.assign(steps, { stream: other });
    // What was skipped is lost, and nothing else.
    steps.release(0);
    await read(steps, { 1: 200, 0: 500 });
    await read(steps, { 1: 100, 0: 100 });
    for (const slot of [0, 1]) steps.finishPrefill(slot, finish);
    for (const slot of [0, 1]) await answer(steps, slot);
    expectBytes(steps);
  });

  it('give everything back when they are given up', async () => {
    const { kind } = open();
    const device = createDevice({ kind, threads: 2 });
    for (const prefill of [hcAttentionPrefill(), hcAttentionPrefill({ blockTokens: 128 })]) {
      const { keys, stores } = await codedStores(device, [codedLayer, { ...codedLayer, index: 1 }], { prefill, values: 'int8', localWindow: 0 });
      const stream = device.createStream();
      const [query, output] = [0, 1].map(() => device.tensor('f32', ['token', 'queryHead', 'dim'], [600, 4, 64], new Float32Array(600 * 256)));
      const [rows, values] = [0, 1].map(() => device.tensor('f32', ['token', 'kvHead', 'dim'], [600, 2, 64], new Float32Array(600 * 128)));
      if (!query || !output || !rows || !values) throw new Error('no tensors were made');
      using batch = createRowBatch(device, stream, chunk(0, 0, 600));
      for (const store of stores) store.prepare(stream, batch);
      const [first] = stores as [KvStore];
      first.append(stream, { batch, keys: rows, values });
      first.advance(batch);
      const rope = ropeDescription({ headDim: 64, theta: 10_000 });
      prefill.attend(stream, { store: first, state: undefined, batch, endsPrompt: [false], query, keys: rows, values, rope, output, scale: 0.125 });
      // Amid the copies, and between two layers.
      for (const store of stores) {
        store.release(stream, 0);
        expect(store.bytes()).toEqual({ device: 0, host: 0 });
        store.dispose();
      }
      stream.dispose();
      for (const tensor of [query, output, rows, values]) tensor.dispose();
      keys[Symbol.dispose]();
      batch.dispose();
      expect(await liveBytes(device, 0)).toBe(0);
    }
  });

  it('are refused without the host memory that they take', async () => {
    const device = open();
    const { keys, options, capacity } = await codedStores(device, [codedLayer], { prefill: hcAttentionPrefill() });
    const before = device.memory().live;
    using pool = await hostPool(device, { bytes: hcAttentionHostBytes(options, [codedLayer], { ...capacity, prefill: undefined }) });
    expect(() => hcAttentionStore({ ...options, hostPool: pool }).create([codedLayer], capacity)).toThrow(OutOfMemoryError);
    pool.dispose();
    expect(await liveBytes(device, before)).toBe(before);
    keys[Symbol.dispose]();
  });

  it('are refused with a selection that observes them', () => {
    const select = (observationWindow: number) => ({ name: 'observer', observationWindow, select: () => undefined });
    for (const prefill of [hcAttentionPrefill(), hcAttentionPrefill({ blockTokens: 64 })]) {
      expect(() => kvPolicy({ prefill, select: select(8) })).toThrow(CapabilityError);
      expect(() => kvPolicy({ prefill, select: select(8) })).toThrow(/'observer'.*'hcattn/);
      expect(kvPolicy({ prefill, select: select(0) }).select?.name).toBe('observer');
    }
    expect(kvPolicy({ select: select(8) }).select?.name).toBe('observer');
  });

  it('refuse options that are none', () => {
    for (const blockTokens of [0, -64, 63, 96, 64.5, NaN, Infinity, '64']) {
      expect(() => hcAttentionPrefill({ blockTokens } as never), String(blockTokens)).toThrow(InvalidValueError);
    }
    expect(() => hcAttentionPrefill(null as never)).toThrow(InvalidValueError);
  });
});

describeOnDeviceKinds('prompts that are read in blocks', ({ open }: TestDevice) => {
  const run = (blockTokens: number, settings: Partial<CodedSettings> = {}) =>
    codedRun(open(), { prefill: hcAttentionPrefill({ blockTokens }), ...settings });

  it.each([
    { blockTokens: 64, localWindow: 0, sinkTokens: 0 },
    { blockTokens: 128, localWindow: 128, sinkTokens: 4, values: 'int8' },
    { blockTokens: 192, localWindow: 30, sinkTokens: 300 },
    { blockTokens: 256, localWindow: 500, sinkTokens: 0 },
  ] as const)('see the first block and their own: $blockTokens, $localWindow, $sinkTokens', async ({ blockTokens, ...options }) => {
    const steps = await run(blockTokens, { ...options, codebooks: { groups: 8, centroids: 4 } });
    await read(steps, { 0: 50 });
    await read(steps, { 0: 400, 1: 100 });
    expectBytes(steps);
    await read(steps, { 0: 31, 1: 1, 2: 600 });
    await read(steps, { 0: 128, 1: 500 });
    expectBytes(steps);
    for (const slot of [0, 1, 2]) steps.finishPrefill(slot, finish);
    expectBytes(steps);
    // Answers, and later prompts, see all.
    for (const slot of [0, 1, 2]) await answer(steps, slot);
    await read(steps, { 0: 200, 1: 90 });
    await answer(steps, 0);
    for (const slot of [0, 1, 2]) steps.release(slot);
    expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
  });

  it('may be forked amid a block', async () => {
    const steps = await run(128, { localWindow: 0 });
    await read(steps, { 0: 300 });
    steps.copy(0, 1);
    await read(steps, { 0: 100, 1: 170 });
    for (const slot of [0, 1]) steps.finishPrefill(slot, finish);
    for (const slot of [0, 1]) await answer(steps, slot);
    // Each block is on the host for as long as one of the two reads it.
    expect(steps.store.bytes([0, 1])).toEqual(steps.store.bytes());
    for (const slot of [0, 1]) expect(steps.store.bytes([slot]).host).toBe(steps.heads[slot]?.reduce((sum, head) => sum + head.bytes().host, 0));
  });

  it('hold few blocks on the host besides, and say what share of the scores they computed', async () => {
    const device = open();
    const layers = [codedLayer];
    const host = async (blockTokens?: number) => {
      const { stores: [store] } = await codedStores(device, layers, { prefill: hcAttentionPrefill({ blockTokens }) });
      return store?.reserved().host ?? NaN;
    };
    const blockBytes = 64 * 64 * 2;
    // Three slots of 16 blocks each, or of two blocks of 128 tokens, for two kv heads; and one more for each.
    expect((await host()) - (await host(128))).toBe(3 * 2 * (16 - 4) * blockBytes);
    const prefill = hcAttentionPrefill({ blockTokens: 128 });
    const [store] = (await codedStores(device, layers, { prefill })).stores as [KvStore];
    const steps = new StoreRun(store, prefill, { device, random: new Random(1), dtype: 'f16', slots: 3, group: 2 }, () => new HeldRows('f16', 64));
    const shares: number[] = [];
    const attend = quantizedPrompts.expect(store, 'a test');
    const whole = attend.attend.bind(attend);
    attend.attend = (...given) => {
      const share = whole(...given);
      shares.push(share);
      return share;
    };
    for (const [position, rows] of [[0, 128], [128, 128], [256, 128]] as const) await steps.step(chunk(0, position, rows), 'prefill');
    const seen = (128 * 129) / 2 + 128 * 128;
    expect(shares).toEqual([1, 1, seen / (seen + 128 * 128)]);
  });

  it('work over codes on the device as well', async () => {
    const device = open();
    const prefill = hcAttentionPrefill({ blockTokens: 128 });
    const capacity = { device, slots: 2, tokensPerSlot: 1024, tokens: 2048, batchRows: 700, prefill };
    const [store] = hcAttentionStore({ keys: 'int8', values: 'int8', valuesOn: 'device', dtype: 'f16' }).create([codedLayer], capacity) as [KvStore];
    const options = { device, random: new Random(1), dtype: 'f16', slots: 2, group: 2, roundings: 8 } as const;
    const blocks = quantizedOracle(64, { keys: 8, values: 8 });
    const head = { dtype: 'f16', headDim: 64, blocks, sinkBlocks: 0, localWindow: 64, promptBlockTokens: 128 } as const;
    const steps = new StoreRun(store, prefill, options, () => new HeadOracle(head));
    await read(steps, { 0: 70 });
    await read(steps, { 0: 300, 1: 390 });
    await read(steps, { 0: 200, 1: 190 });
    for (const slot of [0, 1]) steps.finishPrefill(slot, finish);
    for (const slot of [0, 1]) await answer(steps, slot);
  });

  it('are refused where kv heads hold other tokens', async () => {
    const steps = await run(64);
    await read(steps, { 0: 100 });
    using indices = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [2, 2], Int32Array.of(0, 1, 0, 0));
    steps.store.keep(steps.stream, 0, { indices, counts: [2, 1] });
    await expect(steps.step(chunk(0, 100, 10), 'prefill')).rejects.toThrow(CapabilityError);
  });
});
