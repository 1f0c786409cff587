import {
  CapabilityError,
  createDevice,
  createRowBatch,
  densePagedStore,
  densePrefill,
  DeviceError,
  DisposedError,
  InvalidValueError,
  type KvLayer,
  type KvStore,
  OutOfMemoryError,
  type PrefillAttention,
} from '@kv/sparse-core';
import { describeOnDeviceKinds, HeldRows, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { hcAttentionPrefill } from './hc-attention-prefill.js';
import type { Codec, QuantizedOptions } from './hc-attention-options.js';
import { hcAttentionStore } from './hc-attention-store.js';
import { quantizedBlockBytes } from './quantized-blocks.js';
import { answersOf } from './testing/answers-of.js';
import { quantizedOracle } from './testing/block-oracles.js';
import { HeadOracle } from './testing/head-oracle.js';

const layer: KvLayer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };
const [slots, group, tokensPerSlot] = [3, 2, 1024];
/** Of keys and values of 64 tokens of a kv head. */
const denseBytes = 2 * 64 * 64 * 2;

const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const range = (length: number) => Array.from({ length }, (_, index) => index);
const quantize = (head: HeadOracle) => head.quantize();

interface Settings extends Partial<Omit<QuantizedOptions, 'valuesOn'>> {
  readonly prefill?: PrefillAttention;
  readonly tokens?: number;
  readonly seed?: number;
}

describeOnDeviceKinds('hcAttentionStore', ({ open }: TestDevice) => {
  function run({ prefill = hcAttentionPrefill(), tokens = slots * tokensPerSlot, seed = 1, ...options }: Settings = {}) {
    const device = open();
    const { keys = 'int8', values = keys, sinkTokens = 0, localWindow = 64 } = options;
    const factory = hcAttentionStore({ dtype: 'f16', ...options, keys, values, valuesOn: 'device' });
    const [store] = factory.create([layer], { device, slots, tokensPerSlot, tokens, batchRows: 700, prefill }) as [KvStore];
    const bitsOf = (codec: Codec) => (codec === 'int8' ? 8 : 4);
    const bits = { keys: bitsOf(keys), values: bitsOf(values) } as const;
    const blocks = quantizedOracle(64, bits);
    const head = { dtype: 'f16', headDim: 64, blocks, sinkBlocks: Math.ceil(sinkTokens / 64), localWindow } as const;
    // A prompt's rows attend to a dense part and up to three pieces, each rounded, and so is each merge.
    const options16 = { device, random: new Random(seed), dtype: 'f16', slots, group, roundings: 8 } as const;
    return new StoreRun(store, prefill, options16, () => new HeadOracle(head));
  }

  /** A chunk of a prompt that is quantized behind its attention. */
  async function read(steps: StoreRun<HeadOracle>, entries: ReturnType<typeof chunk>) {
    await steps.check(entries, 'prefill');
    for (const { slot } of entries) steps.heads[slot]?.forEach(quantize);
  }
  const bytesOf = (steps: StoreRun<HeadOracle>) => steps.heads.flat().reduce((sum, head) => sum + head.bytes().device, 0);

  it.each([
    { keys: 'int8', localWindow: 0 },
    { keys: 'int4', localWindow: 0 },
    { keys: 'int8', values: 'int4', sinkTokens: 64, localWindow: 100 },
    { keys: 'int4', values: 'int8', sinkTokens: 1, localWindow: 64 },
  ] as const)('holds what the oracle does, prompts quantized as they are read: $keys, $values, $sinkTokens, $localWindow', async (options) => {
    const steps = run(options);
    // Two prompts in turns, in chunks that end within blocks.
    await read(steps, chunk(0, 0, 300));
    await read(steps, chunk(2, 0, 70));
    await read(steps, [...chunk(0, 300, 270), ...chunk(2, 70, 410)]);
    expect(steps.store.bytes()).toEqual({ device: bytesOf(steps), host: 0 });
    for (const slot of [0, 2]) steps.finishPrefill(slot, quantize);
    // Answers cross the end of a block, behind which another leaves the local window.
    for (const step of range(8)) {
      await steps.check([...chunk(2, 480 + step, 1), ...chunk(0, 570 + step, 1)], 'decode', quantize);
    }
    expect(steps.store.bytes()).toEqual({ device: bytesOf(steps), host: 0 });
    expect(steps.store.lengths(0)).toEqual([578, 578]);
    // A second prompt, behind the codes of the first.
    await read(steps, chunk(0, 578, 90));
    await steps.check(chunk(0, 668, 1), 'decode', quantize);
    expect(steps.store.bytes()).toEqual({ device: bytesOf(steps), host: 0 });
    steps.store.dispose();
  });

  it('quantizes a prompt of dense attention when it is complete, and attends to it behind the next', async () => {
    const steps = run({ keys: 'int4', prefill: densePrefill() });
    await steps.check(chunk(1, 0, 330), 'prefill');
    await steps.check(chunk(1, 330, 200), 'prefill');
    expect(steps.store.bytes().device).toBe(2 * 9 * denseBytes);
    expect(steps.store.denseBlocks([1])).toBeDefined();
    steps.finishPrefill(1, quantize);
    expect(steps.store.bytes().device).toBe(bytesOf(steps));
    expect(bytesOf(steps)).toBe(2 * (2 * denseBytes + 7 * 2 * quantizedBlockBytes(64, 4)));
    await steps.check(chunk(1, 530, 1), 'decode', quantize);
    await read(steps, chunk(1, 531, 200));
    steps.finishPrefill(1, quantize);
    await steps.check(chunk(1, 731, 1), 'decode', quantize);
    expect(steps.store.bytes().device).toBe(bytesOf(steps));
    steps.store.dispose();
  });

  it('is the dense store, bit for bit, while a text is no longer than its window', async () => {
    const device = open();
    const [store] = densePagedStore({ dtype: 'f16' }).create([layer], { device, slots, tokensPerSlot, tokens: 3072 }) as [KvStore];
    const options = { device, random: new Random(1), dtype: 'f16', slots, group } as const;
    const dense = new StoreRun(store, densePrefill(), options, () => new HeldRows('f16', 64));
    const results = [];
    for (const steps of [dense, run({ localWindow: 600 }), run({ sinkTokens: 600, localWindow: 0 }), run({ localWindow: 600, prefill: densePrefill() })]) {
      const bits = [await steps.step(chunk(1, 0, 500), 'prefill'), await steps.step(chunk(1, 500, 33), 'prefill')];
      steps.finishPrefill(1);
      for (const step of range(3)) bits.push(await steps.step(chunk(1, 533 + step, 1), 'decode'));
      results.push(bits);
    }
    for (const result of results) expect(result).toEqual(results[0]);
  });

  async function answers(prefill: PrefillAttention, chunks: readonly number[], batched: boolean, recorded = false) {
    const { store, stream } = run({ keys: 'int4', values: 'int8', prefill, localWindow: 32 });
    return await answersOf(stream, store, prefill, { chunks, batched, recorded });
  }

  it('answers the same bits whatever the chunks of a prompt were, alone or in a batch, recorded or not', async () => {
    const whole = await answers(hcAttentionPrefill(), [400, 175], false);
    for (const chunks of [[64, 511], Array<number>(5).fill(115), [1, 63, 300, 211]]) {
      expect(await answers(hcAttentionPrefill(), chunks, false)).toEqual(whole);
    }
    expect(await answers(densePrefill(), [300, 275], false)).toEqual(whole);
    const batched = await answers(hcAttentionPrefill(), [300, 275], true);
    // A GPU splits the codes of a batch otherwise than those of one sequence.
    if (open().kind === 'cpu') expect(batched).toEqual(whole);
    expect(await answers(hcAttentionPrefill(), [300, 275], true, true)).toEqual(batched);
  });

  it('reserves the bytes of codes where prompts are quantized as they are read, and of the whole prompt where not', () => {
    const [codes, dense] = [hcAttentionPrefill(), densePrefill()].map((prefill) => run({ keys: 'int4', prefill, tokens: 2 ** 20 }).store);
    const quantized = ((2 * 2 ** 20) / 64) * 2 * quantizedBlockBytes(64, 4);
    const ofTokens = ((2 * 2 ** 20) / 64) * denseBytes;
    expect(codes?.reserved().device).toBeGreaterThan(quantized);
    expect(codes?.reserved().device).toBeLessThan(quantized + ofTokens / 100);
    expect(dense?.reserved().device).toBeGreaterThan(quantized + ofTokens);
  });

  it('gives its memory back, and serves others from it', async () => {
    // Room for one sequence and a bit.
    const steps = run({ tokens: 700, localWindow: 0 });
    for (const round of range(4)) {
      const [slot, other] = [round % slots, (round + 1) % slots];
      await read(steps, chunk(slot, 0, 400));
      await read(steps, chunk(slot, 400, 250));
      steps.finishPrefill(slot, quantize);
      await steps.check(chunk(slot, 650, 1), 'decode', quantize);
      await expect(steps.step(chunk(other, 0, 460), 'prefill')).rejects.toThrow(OutOfMemoryError);
      steps.release(slot);
      steps.release(other);
      expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
    }
  });

  it('has room for every prompt that it admits to be quantized', async () => {
    const steps = run({ tokens: 640, localWindow: 0, prefill: densePrefill() });
    await steps.check(chunk(0, 0, 640), 'prefill');
    await expect(steps.step(chunk(1, 0, 64), 'prefill')).rejects.toThrow(OutOfMemoryError);
    steps.release(1);
    await steps.check(chunk(1, 0, 63), 'prefill');
    for (const slot of [0, 1]) steps.finishPrefill(slot, quantize);
    await steps.check([...chunk(0, 640, 1), ...chunk(1, 63, 1)], 'decode', quantize).catch((error: unknown) => {
      expect(error).toBeInstanceOf(OutOfMemoryError);
    });
    steps.release(1);
    steps.release(0);
    await steps.check(chunk(2, 0, 640), 'prefill');
    steps.finishPrefill(2, quantize);
    await steps.check(chunk(2, 640, 1), 'decode', quantize);
  });

  it('keeps a selection of a dense prompt, and quantizes it then; of a quantized one it refuses to', async () => {
    const steps = run({ keys: 'int4', prefill: densePrefill() });
    await steps.check(chunk(1, 0, 600), 'prefill');
    const kept = [range(600).filter((token) => token % 5 > 0), range(600).filter((token) => token % 3 > 0)];
    const indices = new Int32Array(2 * 480);
    kept.forEach((tokens, head) => indices.set(tokens, head * 480));
    using selection = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [2, 480], indices);
    const keep = (counts: readonly number[]) => () => steps.store.keep(steps.stream, 1, { indices: selection, counts });
    keep([480, 400])();
    kept.forEach((tokens, head) => steps.heads[1]?.[head]?.keep(tokens));
    steps.finishPrefill(1, quantize);
    for (const step of range(3)) await steps.check(chunk(1, 600 + step, 1), 'decode', quantize);
    expect(steps.store.lengths(1)).toEqual([483, 403]);
    expect(steps.store.bytes().device).toBe(bytesOf(steps));
    expect([steps.store.denseBlocks(), steps.store.denseBlocks([1])]).toEqual([undefined, undefined]);
    expect(steps.store.denseBlocks([0, 2])).toBeDefined();
    expect(keep([1, 1])).toThrow(CapabilityError);
    // The heads have other counts of blocks, and are read piece by piece.
    await read(steps, chunk(1, 603, 200));
    await steps.check(chunk(1, 803, 1), 'decode', quantize);
  });

  it.each([{ keys: 'int8', sinkTokens: 64, localWindow: 40 }, { keys: 'int4', localWindow: 0 }] as const)(
    'forgets the newest tokens, also of what is quantized, which is dense again then: $keys',
    async (options) => {
      const steps = run(options);
      await read(steps, chunk(1, 0, 600));
      steps.finishPrefill(1, quantize);
      let length = 600;
      for (const forgotten of [1, 30, 64, 100, 7, 300, 60]) {
        steps.store.truncate(steps.stream, 1, forgotten);
        for (const head of steps.heads[1] ?? []) head.truncate(forgotten);
        length -= forgotten;
        expect(steps.store.lengths(1)).toEqual([length, length]);
        expect(steps.store.bytes().device).toBe(bytesOf(steps));
        for (const step of range(2)) await steps.check(chunk(1, length + step, 1), 'decode', quantize);
        length += 2;
      }
      expect(() => steps.store.truncate(steps.stream, 1, length + 1)).toThrow(InvalidValueError);
      await read(steps, chunk(1, length, 250));
      await steps.check(chunk(1, length + 250, 1), 'decode', quantize);
    },
  );

  it('refuses by name what it cannot do', async () => {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: 1024 };
    const wrong: readonly object[] = [{ keys: 'int3' }, { values: undefined }, { keys: 8 }, { sinkTokens: -1 }, { localWindow: 0.5 }, { dtype: 'i32' }];
    const right = { keys: 'int8', values: 'int4', valuesOn: 'device' } as const;
    for (const given of wrong) expect(() => hcAttentionStore({ ...right, ...given })).toThrow(InvalidValueError);
    expect(() => hcAttentionStore({ ...right, valuesOn: undefined as never })).toThrow(CapabilityError);
    // Values on the host are no integers of 4 bits.
    expect(() => hcAttentionStore({ ...right, valuesOn: 'host' } as never)).toThrow(InvalidValueError);
    expect(() => hcAttentionStore(right).create([{ ...layer, headDim: 1024 }], capacity)).toThrow(CapabilityError);
    expect(device.memory().live).toBe(0);
    const [dense] = densePagedStore().create([layer], capacity) as [KvStore];
    const options = { device, random: new Random(1), dtype: 'f16', slots, group } as const;
    const other = new StoreRun(dense, hcAttentionPrefill(), options, () => new HeldRows('f16', 64));
    await expect(other.step(chunk(0, 0, 4), 'prefill')).rejects.toThrow(CapabilityError);
    await expect(run().step(chunk(0, 0, 2000), 'prefill')).rejects.toThrow(InvalidValueError);
    expect(hcAttentionStore(right).name).toBe('hcattn int8 keys, int4 values');
  });

  it('refuses streams of another device, and changes nothing then', () => {
    const { store } = run();
    const other = createDevice({ kind: 'cpu', threads: 1 });
    const foreign = other.createStream();
    using batch = createRowBatch(other, foreign, chunk(0, 0, 640));
    expect(() => store.prepare(foreign, batch)).toThrow(DeviceError);
    expect(() => store.finishPrefill?.(foreign, 0)).toThrow(DeviceError);
    expect(() => store.copy?.(foreign, 0, 1)).toThrow(DeviceError);
    expect(() => store.truncate(foreign, 0, 0)).toThrow(DeviceError);
    expect(() => store.release(foreign, 0)).toThrow(DeviceError);
    expect(store.bytes().device).toBe(0);
  });

  it('is disposed once, however often it is said, and says so afterwards', async () => {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: 1024, prefill: hcAttentionPrefill() };
    const factory = hcAttentionStore({ keys: 'int8', values: 'int8', valuesOn: 'device' });
    const [first, second] = factory.create([layer, { ...layer, index: 1 }], capacity) as [KvStore, KvStore];
    const options = { device, random: new Random(1), dtype: 'f16', slots, group, roundings: 8 } as const;
    const head = { dtype: 'f16', headDim: 64, blocks: quantizedOracle(64, { keys: 8, values: 8 }), sinkBlocks: 0, localWindow: 64 } as const;
    const [disposed, alive] = [first, second].map(
      (store) => new StoreRun(store, capacity.prefill, options, () => new HeadOracle(head)),
    ) as [StoreRun<HeadOracle>, StoreRun<HeadOracle>];
    await read(disposed, chunk(0, 0, 300));
    first.dispose();
    first.dispose();
    await expect(disposed.step(chunk(0, 300, 1), 'decode')).rejects.toThrow(DisposedError);
    expect(() => first.finishPrefill?.(disposed.stream, 0)).toThrow(DisposedError);
    await read(alive, chunk(0, 0, 300));
    await alive.check(chunk(0, 300, 1), 'decode', quantize);
    second.dispose();
  });

  it('gives everything back when it does not fit', async () => {
    const { kind } = open();
    const device = createDevice({ kind, threads: 1, memoryLimit: 50_000_000 });
    const factory = hcAttentionStore({ keys: 'int8', values: 'int4', valuesOn: 'device' });
    const capacity = { device, slots, tokensPerSlot, tokens: 1024, prefill: hcAttentionPrefill() };
    const layers = [layer, { ...layer, index: 1 }];
    const stores = factory.create(layers, capacity);
    const needed = device.memory().live;
    expect(stores.reduce((sum, store) => sum + store.reserved().device, 0)).toBe(needed);
    for (const store of stores) store.dispose();
    await device.defaultStream.synchronize();
    for (let missing = 1; missing <= needed; missing += Math.ceil(needed / 40)) {
      using rest = device.tensor('u8', ['byte'], [50_000_000 - needed + missing]);
      expect(() => factory.create(layers, capacity)).toThrow(OutOfMemoryError);
      await device.defaultStream.synchronize();
      expect(device.memory().live).toBe(rest.byteLength);
    }
  });
});
