import {
  CapabilityError,
  createDevice,
  createRowBatch,
  densePagedStore,
  densePrefill,
  DeviceError,
  hostPool,
  InvalidValueError,
  type KvStore,
  OutOfMemoryError,
  type PrefillAttention,
  ShapeError,
} from '@kv/sparse-core';
import { decode, describeOnDeviceKinds, encode, HeldRows, liveBytes, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { placeCodebooks } from './codebooks/place-codebooks.js';
import { hcAttentionPrefill } from './hc-attention-prefill.js';
import { hcAttentionHostBytes, hcAttentionStore } from './hc-attention-store.js';
import { answersOf, type Reading } from './testing/answers-of.js';
import { codedLayer, codedRun, type CodedSettings, codedStores } from './testing/coded-run.js';
import type { HeadOracle } from './testing/head-oracle.js';
import { randomCodebooks } from './testing/random-codebooks.js';

const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const range = (length: number) => Array.from({ length }, (_, index) => index);
const quantize = (head: HeadOracle) => head.quantize();
const finish = (head: HeadOracle) => {
  head.finished = true;
  head.quantize();
};

describeOnDeviceKinds('hcAttentionStore with values on the host', ({ open }: TestDevice) => {
  const run = (settings: Partial<CodedSettings> = {}) => codedRun(open(), { prefill: hcAttentionPrefill(), ...settings });

  /** A chunk of a prompt that is quantized behind its attention. */
  async function read(steps: StoreRun<HeadOracle>, entries: ReturnType<typeof chunk>) {
    for (const head of steps.heads.flat()) head.readsPrompt = true;
    await steps.check(entries, 'prefill');
    for (const head of steps.heads.flat()) head.readsPrompt = false;
    for (const { slot } of entries) steps.heads[slot]?.forEach(quantize);
  }
  function bytesOf(steps: StoreRun<HeadOracle>) {
    const heads = steps.heads.flat().map((head) => head.bytes());
    const sum = (numbers: readonly number[]) => numbers.reduce((total, number) => total + number, 0);
    return { device: sum(heads.map(({ device }) => device)), host: sum(heads.map(({ host }) => host)) };
  }

  it.each([
    { sinkTokens: 0, localWindow: 0, values: 'f16' },
    { sinkTokens: 4, localWindow: 100, values: 'int8', codebooks: { separate: true, scaled: true, groups: 32, centroids: 5 } },
    { sinkTokens: 0, localWindow: 64, values: 'int8', hostKeys: true },
    { sinkTokens: 65, localWindow: 64, values: undefined, missingMass: 'meanValue', codebooks: { groups: 8, centroids: 100, scaled: true } },
    { sinkTokens: 0, localWindow: 32, values: 'f16', keys: 'int8' },
    { sinkTokens: 4, localWindow: 64, values: 'int8', keys: 'int4', rotated: false },
    { sinkTokens: 0, localWindow: 0, values: 'f16', keys: 'int3' },
    { sinkTokens: 0, localWindow: 100, values: 'int8', keys: 'int2', hostKeys: true },
  ] as const)('holds what the oracle does, prompts coded as they are read: $sinkTokens, $localWindow, $values, $keys, $hostKeys', async (options) => {
    const steps = await run(options);
    // Two prompts in turns, in chunks that end within blocks.
    await read(steps, chunk(0, 0, 300));
    await read(steps, chunk(2, 0, 70));
    await read(steps, [...chunk(0, 300, 270), ...chunk(2, 70, 410)]);
    expect(steps.store.bytes()).toEqual(bytesOf(steps));
    for (const slot of [0, 2]) steps.finishPrefill(slot, finish);
    // Answers cross the end of a block, behind which another leaves the local window.
    for (const step of range(8)) {
      await steps.check([...chunk(2, 480 + step, 1), ...chunk(0, 570 + step, 1)], 'decode', quantize);
    }
    expect(steps.store.bytes()).toEqual(bytesOf(steps));
    // A second prompt, behind the codes of the first.
    await read(steps, chunk(0, 578, 90));
    await steps.check(chunk(0, 668, 1), 'decode', quantize);
    // And forgets: a block that is cut is dense again.
    for (const [forgotten, left] of [[30, 639], [200, 439], [400, 39]] as const) {
      steps.store.truncate(steps.stream, 0, forgotten);
      for (const head of steps.heads[0] ?? []) head.truncate(forgotten);
      await steps.checkHeld([0]);
      expect(steps.store.lengths(0)).toEqual([left, left]);
      expect(steps.store.bytes()).toEqual(bytesOf(steps));
    }
    for (const slot of [0, 2]) steps.release(slot);
    expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
    steps.store.dispose();
  });

  it('codes a prompt of dense attention when it is complete, after a selection', async () => {
    const steps = await run({ prefill: densePrefill(), values: 'int8' });
    await steps.check(chunk(1, 0, 330), 'prefill');
    await steps.check(chunk(1, 330, 200), 'prefill');
    expect(steps.store.bytes().host).toBe(0);
    const kept = [range(530).filter((token) => token % 5 > 0), range(530).filter((token) => token % 6 > 0)];
    using indices = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [2, 441], Int32Array.from(kept.flatMap((tokens) => [...tokens, ...Array<number>(441 - tokens.length).fill(0)])));
    const keep = () => steps.store.keep(steps.stream, 1, { indices, counts: kept.map(({ length }) => length) });
    keep();
    kept.forEach((tokens, head) => steps.heads[1]?.[head]?.keep(tokens));
    steps.finishPrefill(1, finish);
    await steps.check(chunk(1, 530, 1), 'decode', quantize);
    expect(steps.store.bytes()).toEqual(bytesOf(steps));
    expect(bytesOf(steps).host).toBeGreaterThan(0);
    expect(keep).toThrow(CapabilityError);
    // The next prompt is read over codes.
    await read(steps, chunk(1, 531, 200));
    await steps.check(chunk(1, 731, 1), 'decode', quantize);
  });

  it.each([{}, { hostKeys: true }, { missingMass: 'meanValue' }] as const)('holds kv heads of unequal lengths, and empty ones: %o', async (kind) => {
    const steps = await run({ prefill: densePrefill(), sinkTokens: 0, localWindow: 32, ...kind });
    await steps.check([...chunk(0, 0, 400), ...chunk(1, 0, 300)], 'prefill');
    for (const [slot, kept] of [[0, [0, 350]], [1, [200, 60]]] as const) {
      using indices = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [2, 350], Int32Array.from([...range(350), ...range(350)]));
      steps.store.keep(steps.stream, slot, { indices, counts: kept });
      kept.forEach((count, head) => steps.heads[slot]?.[head]?.keep(range(count)));
      steps.finishPrefill(slot, quantize);
    }
    expect(steps.store.lengths(0)).toEqual([0, 350]);
    for (const step of range(3)) await steps.check([...chunk(1, 300 + step, 1), ...chunk(0, 400 + step, 1)], 'decode', quantize);
    expect(steps.store.bytes()).toEqual(bytesOf(steps));
    // The short heads come to have codes.
    await read(steps, [...chunk(0, 403, 150), ...chunk(1, 303, 130)]);
    await steps.check([...chunk(0, 553, 1), ...chunk(1, 433, 1)], 'decode', quantize);
    expect(steps.store.bytes()).toEqual(bytesOf(steps));
    steps.store.dispose();
  });

  it('is the dense store, bit for bit, while a text is no longer than its window', async () => {
    const device = open();
    const [store] = densePagedStore({ dtype: 'f16' }).create([codedLayer], { device, slots: 3, tokensPerSlot: 1024, tokens: 3072 }) as [KvStore];
    const options = { device, random: new Random(1), dtype: 'f16', slots: 3, group: 2 } as const;
    const dense = new StoreRun(store, densePrefill(), options, () => new HeldRows('f16', 64));
    const results = [];
    for (const steps of [dense, await run({ localWindow: 600 }), await run({ sinkTokens: 600, tau: 0.5 }), await run({ localWindow: 600, tau: 0.5, hostKeys: true }), await run({ localWindow: 600, prefill: densePrefill() })]) {
      const bits = [await steps.step(chunk(1, 0, 500), 'prefill'), await steps.step(chunk(1, 500, 33), 'prefill')];
      steps.finishPrefill(1);
      for (const step of range(3)) bits.push(await steps.step(chunk(1, 533 + step, 1), 'decode'));
      results.push(bits);
    }
    for (const result of results) expect(result).toEqual(results[0]);
  });

  it.each([true, false])('leaves out what codes cost while all is in windows, with the same bits; recorded: %s', async (recorded) => {
    const answers = async (dense: boolean) => {
      const device = open();
      const { stores } = await codedStores(device, [codedLayer], { prefill: hcAttentionPrefill(), localWindow: 600 });
      const [store] = stores as [KvStore];
      return await answersOf(device.createStream(), store, hcAttentionPrefill(), { chunks: [400, 175], batched: true, recorded, dense });
    };
    expect(await answers(true)).toEqual(await answers(false));
  });

  it.each([{ tau: 0.9 }, { tau: 0.5, values: 'int8' }, { tau: 0.5, missingMass: 'paper' }, { tau: 0.7, missingMass: 'meanValue' }, { tau: 0.02 }, { tau: 0.8, keys: 'int4' }, { tau: 0.6, keys: 'int2', rotated: false }] as const)(
    'answers from the fewest tokens that reach the share: $tau, $missingMass, $keys',
    async (options) => {
      const steps = await run({ ...options, localWindow: 64 });
      await read(steps, chunk(0, 0, 500));
      await read(steps, [...chunk(0, 500, 100), ...chunk(1, 0, 400)]);
      for (const slot of [0, 1]) steps.finishPrefill(slot, finish);
      for (const head of steps.heads.flat()) {
        head.tau = options.tau;
        head.missingMass = 'missingMass' in options ? options.missingMass : 'renormalise';
      }
      for (const step of range(5)) await steps.check([...chunk(0, 600 + step, 1), ...chunk(1, 400 + step, 1)], 'decode', quantize);
    },
  );

  it.each(['f16', 'int8'] as const)('chooses tokens by their codes and weights them by their keys, values in %s', async (values) => {
    // A row reads the tokens of all query heads of its kv head; here each has one.
    const steps = await run({ group: 1, tau: 0.6, hostKeys: true, values, localWindow: 64 });
    await read(steps, chunk(0, 0, 500));
    await read(steps, [...chunk(0, 500, 100), ...chunk(1, 0, 400)]);
    for (const slot of [0, 1]) steps.finishPrefill(slot, finish);
    const answer = async (entries: ReturnType<typeof chunk>) => {
      for (const head of steps.heads.flat()) head.tau = 0.6;
      await steps.check(entries, 'decode', quantize);
      for (const head of steps.heads.flat()) head.tau = 1;
    };
    for (const step of range(5)) await answer([...chunk(0, 600 + step, 1), ...chunk(1, 400 + step, 1)]);
    // What is cut, forked and read again says what its keys were, not what their codes say.
    steps.copy(0, 2, 250);
    await read(steps, chunk(2, 355, 100));
    await answer([...chunk(2, 455, 1), ...chunk(0, 605, 1)]);
    steps.store.dispose();
  });

  it('leaves to the mean value of its sequence what a row does not read, through forks, cuts and second prompts', async () => {
    const steps = await run({ tau: 0.7, missingMass: 'meanValue', localWindow: 64 });
    await read(steps, chunk(0, 0, 400));
    steps.finishPrefill(0, finish);
    const answer = async (slots: readonly number[]) => {
      for (const slot of slots) for (const head of steps.heads[slot] ?? []) Object.assign(head, { tau: 0.7, missingMass: 'meanValue' });
      const position = (slot: number) => steps.store.lengths(slot)[0] ?? NaN;
      await steps.check(slots.flatMap((slot) => chunk(slot, position(slot), 1)), 'decode', quantize);
      for (const head of steps.heads.flat()) head.tau = 1;
    };
    steps.copy(0, 1);
    steps.copy(0, 2, 150);
    await answer([0, 1, 2]);
    // Each goes on with values of its own.
    await read(steps, [...chunk(1, 401, 200), ...chunk(2, 251, 130)]);
    await answer([1]);
    await answer([2, 0]);
    steps.store.truncate(steps.stream, 1, 330);
    for (const head of steps.heads[1] ?? []) head.truncate(330);
    await answer([1]);
    steps.release(2);
    // Another sequence gets the blocks, and their means.
    await read(steps, chunk(2, 0, 500));
    steps.finishPrefill(2, finish);
    await answer([2, 1, 0]);
    steps.store.dispose();
  });

  it('reads no more values than maxTokens, and those of other layers by codebooks of their own', async () => {
    const device = open();
    const results = [];
    for (const maxTokens of [undefined, 1024, 10]) {
      const layers = [codedLayer, { ...codedLayer, index: 1 }];
      const { stores } = await codedStores(device, layers, { prefill: hcAttentionPrefill(), localWindow: 32, tau: 1, maxTokens });
      for (const store of stores) {
        const reading = { chunks: [400], batched: true };
        results.push(await answersOf(device.createStream(), store, hcAttentionPrefill(), reading));
      }
    }
    const [first, second, firstOfAll, secondOfAll, firstOfTen] = results;
    expect([firstOfAll, secondOfAll]).toEqual([first, second]);
    expect(firstOfTen).not.toEqual(first);
    expect(second).not.toEqual(first);
  });

  it.each([{}, { hostKeys: true }])('shows a number that is none in its own sequence alone: %o', async (kind) => {
    const device = open();
    const { stores } = await codedStores(device, [codedLayer], { prefill: hcAttentionPrefill(), values: 'int8', tau: 1, ...kind });
    const [store] = stores as [KvStore];
    const stream = device.createStream();
    const dtype = device.kind === 'cuda' ? 'f16' : 'f32';
    const step = async (rows: number, position: number, phase: 'prefill' | 'decode') => {
      const numbers = Float64Array.from({ length: 2 * rows * 4 * 64 }, (_, index) => Math.sin(index));
      using batch = createRowBatch(device, stream, [0, 1].map((slot) => ({ slot, position, rows })));
      const rowsOf = <Head extends 'kvHead' | 'queryHead'>(axis: Head, heads: number, given: Float64Array) =>
        device.tensor(dtype, ['token', axis, 'dim'], [2 * rows, heads, 64], encode(dtype, given.subarray(0, 2 * rows * heads * 64)));
      // The value of one token of the first sequence, which becomes a code.
      const values = numbers.slice();
      if (phase === 'prefill') values[100 * 2 * 64] = NaN;
      const call = { batch, keys: rowsOf('kvHead', 2, numbers), values: rowsOf('kvHead', 2, values) };
      const query = rowsOf('queryHead', 4, numbers);
      const output = device.tensor(dtype, ['token', 'queryHead', 'dim'], [2 * rows, 4, 64]);
      store.prepare(stream, batch);
      store.append(stream, call);
      store.advance(batch);
      if (phase === 'prefill') store.attend?.(stream, { batch, query, output, scale: 0.125 });
      else store.startDecode(stream, { batch, query, output, scale: 0.125 })();
      return decode(dtype, await output.read(stream));
    };
    await step(400, 0, 'prefill');
    for (const slot of [0, 1]) store.finishPrefill?.(stream, slot);
    const rows = await step(1, 400, 'decode');
    const hasNone = (row: number, kvHead: number) => rows.subarray((row * 4 + kvHead * 2) * 64, (row * 4 + kvHead * 2 + 2) * 64).some(Number.isNaN);
    expect([hasNone(0, 0), hasNone(0, 1), hasNone(1, 0), hasNone(1, 1)]).toEqual([true, false, false, false]);
    store.dispose();
  });

  interface Answering {
    readonly recorded?: boolean;
    readonly threads?: number;
    readonly kind?: Partial<CodedSettings>;
  }
  async function answers(prefill: PrefillAttention, chunks: readonly number[], batched: boolean, { recorded = false, threads = 2, kind }: Answering = {}) {
    const device = open(threads);
    const { stores } = await codedStores(device, [codedLayer], { prefill, localWindow: 32, tau: 0.8, ...kind });
    const [store] = stores as [KvStore];
    return await answersOf(device.createStream(), store, prefill, { chunks, batched, recorded });
  }

  it('answers the same bits whatever the chunks of a prompt were, with any threads, alone or in a batch, recorded or not', async () => {
    const whole = await answers(hcAttentionPrefill(), [400, 175], false);
    for (const chunks of [[64, 511], [1, 63, 300, 211]]) {
      expect(await answers(hcAttentionPrefill(), chunks, false)).toEqual(whole);
    }
    for (const threads of [1, 16]) expect(await answers(hcAttentionPrefill(), [400, 175], false, { threads })).toEqual(whole);
    expect(await answers(densePrefill(), [300, 275], false)).toEqual(whole);
    const batched = await answers(hcAttentionPrefill(), [300, 275], true);
    // A GPU splits the windows of a batch otherwise than those of one sequence.
    if (open().kind === 'cpu') expect(batched).toEqual(whole);
    expect(await answers(hcAttentionPrefill(), [300, 275], true, { recorded: true })).toEqual(batched);
  });

  it.each([{ hostKeys: true }, { missingMass: 'meanValue' }, { keys: 'int3' }] as const)(
    'answers the same bits with any threads, alone or in a batch, recorded or not: %o',
    async (kind) => {
      const whole = await answers(hcAttentionPrefill(), [400, 175], false, { kind });
      for (const threads of [1, 16]) expect(await answers(hcAttentionPrefill(), [300, 275], false, { kind, threads })).toEqual(whole);
      const batched = await answers(hcAttentionPrefill(), [400, 175], true, { kind });
      // A GPU splits the windows of a batch otherwise than those of one sequence.
      if (open().kind === 'cpu') expect(batched).toEqual(whole);
      expect(await answers(hcAttentionPrefill(), [400, 175], true, { kind, recorded: true })).toEqual(batched);
    },
  );

  it.each([{ values: 'int8' }, { hostKeys: true }, { keys: 'int4' }] as const)('scores some kv heads while others are summed, with the same bits: %o', async (kind) => {
    const layer = { ...codedLayer, kvHeads: 3, queryHeads: 6 };
    const reading = (batched: boolean, recorded = false) => ({ chunks: [400, 175], batched, recorded, kvHeads: 3 });
    const answersIn = async (tokensPerSlot: number, given: Reading) => {
      const device = open();
      const capacity = { slots: 2, tokensPerSlot, tokens: 2 * tokensPerSlot };
      const { stores } = await codedStores(device, [layer], { prefill: hcAttentionPrefill(), localWindow: 32, tau: 0.8, capacity, ...kind });
      const [store] = stores as [KvStore];
      return await answersOf(device.createStream(), store, hcAttentionPrefill(), given);
    };
    for (const given of [reading(false), reading(false, true), reading(true, true)]) {
      // A cache of 2^19 tokens has its kv heads in two groups, of two and of one.
      expect(await answersIn(2 ** 18, given)).toEqual(await answersIn(1024, given));
    }
  });

  it('takes what it says of device and host, and gives all of it back', async () => {
    const { kind } = open();
    const device = createDevice({ kind, threads: 1, memoryLimit: 200_000_000 });
    const layers = [codedLayer, { ...codedLayer, index: 1 }];
    for (const kind of [{ values: 'f16' }, { values: 'int8' }, { missingMass: 'meanValue' }, { values: 'int8', hostKeys: true }, { keys: 'int3' }] as const) {
      const { keys, options, capacity, stores } = await codedStores(device, layers, { prefill: hcAttentionPrefill(), ...kind });
      const reserved = stores.map((store) => store.reserved());
      const host = reserved.reduce((sum, each) => sum + each.host, 0);
      expect(hcAttentionHostBytes(options, layers, capacity) - host).toBeLessThan(9 * 256);
      for (const store of stores) store.dispose();
      await device.defaultStream.synchronize();
      const placed = await liveBytes(device, device.memory().live);
      using pool = await hostPool(device, { bytes: hcAttentionHostBytes(options, layers, capacity) - 256 });
      const before = device.memory().live;
      expect(() => hcAttentionStore({ ...options, hostPool: pool }).create(layers, capacity)).toThrow(OutOfMemoryError);
      expect(await liveBytes(device, before)).toBe(before);
      pool.dispose();
      keys[Symbol.dispose]();
      expect(await liveBytes(device, 0)).toBe(0);
      expect(placed).toBeGreaterThan(0);
    }
  });

  it('refuses by name what it cannot do', async () => {
    const device = open();
    const { keys, options, capacity } = await codedStores(device, [codedLayer], { prefill: densePrefill() });
    const wrong: readonly object[] = [
      ...[0, -1, 1.01, NaN, '1'].map((tau) => ({ tau })),
      ...[0, 1.5].map((maxTokens) => ({ maxTokens })),
      { keys: keys.codebooks }, { values: 'int4' }, { missingMass: 'mean' }, { values: 'int8', missingMass: 'meanValue' },
      { hostKeys: 1 }, { hostKeys: true, missingMass: 'paper' }, { hostKeys: true, missingMass: 'meanValue' }, { hostPool: {} },
      { values: 'bf16' }, { sinkTokens: -1 }, { localWindow: 0.5 },
      { keys: 'int5' }, { keys: 'toString' }, { rotated: true }, { keys: 'int4', rotated: 1 },
    ];
    for (const given of wrong) expect(() => hcAttentionStore({ ...options, ...given }), JSON.stringify(given)).toThrow(InvalidValueError);
    expect(() => hcAttentionStore({ ...options, valuesOn: 'device' as never })).toThrow(InvalidValueError);
    const create = (given: object, layers = [codedLayer]) => () => hcAttentionStore({ ...options, ...given }).create(layers, capacity);
    expect(create({}, [codedLayer, { ...codedLayer, index: 1 }])).toThrow(ShapeError);
    expect(create({}, [{ ...codedLayer, headDim: 128 }])).toThrow(ShapeError);
    expect(create({}, [{ ...codedLayer, kvHeads: 4 }])).toThrow(ShapeError);
    const other = createDevice({ threads: 1 });
    using elsewhere = await placeCodebooks(other, randomCodebooks(new Random(1), { layers: 1, kvHeads: 2, headDim: 64, groups: 16, centroids: 4 }));
    expect(create({ keys: elsewhere })).toThrow(DeviceError);
    using pool = await hostPool(other, { bytes: 1 });
    expect(create({ hostPool: pool })).toThrow(DeviceError);
    if (device.kind === 'cuda') expect(create({ hostPool: undefined })).toThrow(/hostPool\(device, \{ bytes: \d+ \}\)/);
    expect(hcAttentionStore(options).name).toBe('hcattn 16 groups');
    expect(hcAttentionStore({ ...options, hostKeys: true }).name).toBe('hcattn 16 groups, keys on the host too');
    expect(hcAttentionStore({ ...options, keys: 'int4' }).name).toBe('hcattn int4 keys over host values');
    expect(hcAttentionStore({ ...options, keys: 'int2', rotated: false, values: 'int8' }).name).toBe('hcattn plain int2 keys over host values, int8 values');
    expect(create({ keys: 'int4' }, [{ ...codedLayer, headDim: 544 }])).toThrow(CapabilityError);
    keys[Symbol.dispose]();
    expect(create({})).toThrow('disposed');
  });
});
