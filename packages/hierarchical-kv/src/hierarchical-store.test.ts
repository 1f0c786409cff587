import {
  createDevice,
  createRowBatch,
  densePrefill,
  hostPool,
  InvalidValueError,
  type KvLayer,
  type KvStore,
  OutOfMemoryError,
} from '@kv/sparse-core';
import { describeOnDeviceKinds, HeldRows, liveBytes, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { type BlockOptions, hierarchicalDeviceBytes, hierarchicalHostBytes, type HierarchicalOptions, hierarchicalStore } from './hierarchical-store.js';

const layer: KvLayer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };
const [slots, group, tokensPerSlot] = [3, 2, 1024];
const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const range = (length: number) => Array.from({ length }, (_, index) => index);

/** Enough for all blocks. */
const plenty = 2 ** 26;

describeOnDeviceKinds('hierarchicalStore', ({ open }: TestDevice) => {
  async function run(options: Partial<HierarchicalOptions> = {}, { seed = 1, tokens = slots * tokensPerSlot, recorded = false } = {}) {
    const device = open();
    const all = { deviceBytes: plenty, ...options };
    const capacity = { device, slots, tokensPerSlot, tokens };
    using pool = await hostPool(device, { bytes: hierarchicalHostBytes(all, [layer], capacity) });
    const [store] = hierarchicalStore({ ...all, hostPool: pool }).create([layer], capacity) as [KvStore];
    const settings = { device, random: new Random(seed), dtype: 'f16', slots, group, recorded } as const;
    return new StoreRun(store, densePrefill(), settings, () => new HeldRows('f16', layer.headDim));
  }

  /** Enough for steps of so many answers. */
  const bytesFor = (options: BlockOptions, answers: number) =>
    hierarchicalDeviceBytes(options, [layer], { device: open(), slots, tokensPerSlot, tokens: slots * tokensPerSlot }, answers);

  /** Prompts in chunks, answers, a fork, an end. */
  async function steps(of: StoreRun<HeldRows>, step: StoreRun<HeldRows>['step']): Promise<Float32Array[]> {
    const bits = [await step(chunk(0, 0, 300), 'prefill'), await step([...chunk(0, 300, 270), ...chunk(2, 0, 65)], 'prefill')];
    for (const each of range(40)) bits.push(await step([...chunk(2, 65 + each, 1), ...chunk(0, 570 + each, 1)], 'decode'));
    of.copy(0, 1, 3);
    for (const each of range(4)) bits.push(await step([...chunk(1, 607 + each, 1), ...chunk(0, 610 + each, 1)], 'decode'));
    of.release(2);
    bits.push(await step(chunk(2, 0, 33), 'prefill'), await step(chunk(2, 33, 1), 'prefill'));
    of.store.truncate(of.stream, 0, 100);
    for (const head of of.heads[0] ?? []) head.truncate(100);
    for (const each of range(40)) bits.push(await step([...chunk(0, 514 + each, 1), ...chunk(2, 34 + each, 1), ...chunk(1, 611 + each, 1)], 'decode'));
    return bits;
  }

  it('reads all of a sequence that is not longer than the budget, as a dense store does', async () => {
    const all = await run({ budgetTokens: 1024 });
    await steps(all, async (entries, phase) => {
      await all.check(entries, phase);
      return new Float32Array();
    });
    expect(all.store.lengths(0)).toEqual([554, 554]);
  });

  it('gives the same bits with all blocks on the device, and with as few as one step reads', async () => {
    for (const options of [{ budgetTokens: 256 }, { budgetTokens: 160, sinkTokens: 0, localWindow: 0, metadata: 'mean' as const }]) {
      const [resident, capped] = [await run(options), await run({ ...options, deviceBytes: bytesFor(options, slots) })];
      const bits = await steps(resident, (entries, phase) => resident.step(entries, phase));
      expect(await steps(capped, (entries, phase) => capped.step(entries, phase))).toEqual(bits);
    }
  });

  it('gives the same bits with its steps recorded, however few blocks the device has', async () => {
    const options = { budgetTokens: 256, deviceBytes: bytesFor({ budgetTokens: 256 }, slots) };
    const [plain, recorded] = [await run(options), await run(options, { recorded: true })];
    const bits = await steps(plain, (entries, phase) => plain.step(entries, phase));
    expect(await steps(recorded, (entries, phase) => recorded.step(entries, phase))).toEqual(bits);
  });

  it('counts hits, misses and working sets of its slots, and evicts them', async () => {
    const few = await run({ budgetTokens: 256 });
    await few.step(chunk(1, 0, 900), 'prefill');
    expect(few.store.demand?.(1)).toBeUndefined();
    const answers = async (first: number, count: number) => {
      for (const each of range(count)) await few.step(chunk(1, first + each, 1), 'decode');
      // Whoever asks gets what arrives behind the next step.
      few.store.demand?.(1);
      await few.step(chunk(1, first + count, 1), 'decode');
      const steps = first + count - 900;
      while ((few.store.demand?.(1)?.step ?? 0) < steps) await new Promise((resolve) => setTimeout(resolve, 1));
      return few.store.demand?.(1);
    };
    const first = await answers(900, 15);
    // Of 8 blocks 4 are the first and the last.
    expect((first?.hits ?? NaN) + (first?.misses ?? NaN)).toBe(15 * 2 * 4);
    // The cache has room for all of the prompt, and so it has all.
    expect(first?.misses).toBe(0);
    expect(first?.workingSet).toBeGreaterThanOrEqual(8);
    expect(first?.workingSet).toBeLessThanOrEqual(12 * 8);
    few.store.evict?.(few.stream, 1);
    const second = await answers(916, 1);
    expect((second?.misses ?? NaN) - (first?.misses ?? NaN)).toBeGreaterThanOrEqual(8);
    few.release(1);
    expect(few.store.demand?.(1)).toBeUndefined();
  });

  it('reads as much of each slot as its budget says', async () => {
    const entries = [...chunk(0, 600, 1), ...chunk(1, 600, 1)];
    const bitsWith = async (options: Partial<HierarchicalOptions>, budgets: readonly (number | undefined)[]) => {
      const all = await run({ budgetTokens: 512, ...options });
      for (const slot of [0, 1]) await all.step(chunk(slot, 0, 600), 'prefill');
      budgets.forEach((budget, slot) => all.store.setBudget?.(all.stream, slot, budget));
      return { all, bits: await all.step(entries, 'decode') };
    };
    const [whole, small] = [await bitsWith({}, []), await bitsWith({ budgetTokens: 160 }, [])];
    const rows = whole.bits.length / 2;
    const mixed = await bitsWith({}, [160, undefined]);
    expect(mixed.bits.subarray(0, rows)).toEqual(small.bits.subarray(0, rows));
    expect(mixed.bits.subarray(rows)).toEqual(whole.bits.subarray(rows));
    expect(small.bits).not.toEqual(whole.bits);
    // Of sinks, window and the newest block, the last may have one token.
    for (const wrong of [96, 513, 200.5, NaN]) {
      expect(() => mixed.all.store.setBudget?.(mixed.all.stream, 0, wrong), String(wrong)).toThrow('a whole number from 97 to 512');
    }
    // A cache that has room for what one answer of the store's own budget reads has it for two smaller ones.
    const capped = { deviceBytes: bytesFor({ budgetTokens: 512 }, 1) };
    await expect(bitsWith(capped, [])).rejects.toThrow(OutOfMemoryError);
    expect((await bitsWith(capped, [160, 160])).bits).toEqual(small.bits);
    mixed.all.release(0);
    await mixed.all.step(chunk(0, 0, 600), 'prefill');
    await mixed.all.step(chunk(0, 600, 1), 'decode');
  });

  it('fails a step that reads a block of the host which is not what was written', async () => {
    const checked = await run({ budgetTokens: 256, checksums: true });
    await checked.step(chunk(0, 0, 900), 'prefill');
    for (const each of range(40)) await checked.step(chunk(0, 900 + each, 1), 'decode');
    checked.store.evict?.(checked.stream, 0);
    await checked.step(chunk(0, 940, 1), 'decode');
    checked.store.evict?.(checked.stream, 0);
    (await checked.store.makeDense?.(checked.stream, 0))?.();
    const { values } = checked.store.denseBlocks([0]) ?? {};
    const elements = (await values?.read(checked.stream)) as Uint16Array;
    if (values) checked.stream.write(values, elements.map((element) => element ^ 0x100));
    await expect(checked.step(chunk(0, 941, 1), 'decode')).rejects.toThrow('is not what was written');
  });

  it('gives back what it takes, and says how much that is', async () => {
    const device = open();
    const before = await liveBytes(device, 0);
    const capacity = { device, slots, tokensPerSlot, tokens: 2048 };
    const layers = range(3).map((index) => ({ ...layer, index }));
    const deviceBytes = hierarchicalDeviceBytes({ budgetTokens: 256 }, layers, capacity, 2);
    using pool = await hostPool(device, { bytes: hierarchicalHostBytes({}, layers, capacity) });
    const stores = hierarchicalStore({ deviceBytes, hostPool: pool, budgetTokens: 256 }).create(layers, capacity);
    expect(stores).toHaveLength(3);
    const reserved = stores.map((store) => store.reserved());
    expect(reserved.reduce((sum, each) => sum + each.device, 0)).toBe(deviceBytes);
    expect(reserved[0]?.host).toBe((2048 / 32 + slots) * 2 * 2 * 32 * 64 * 2);
    for (const store of stores) store.dispose();
    pool.dispose();
    expect(await liveBytes(device, before)).toBe(before);
  });

  /** Keeps these tokens of each kv head of a slot, as a selection does at the end of a prompt. */
  async function keep({ store, stream, heads }: StoreRun<HeldRows>, slot: number, kept: readonly (readonly number[])[]) {
    (await store.makeDense?.(stream, slot))?.();
    expect(store.denseBlocks([slot])).toBeDefined();
    const most = Math.max(...kept.map(({ length }) => length));
    const indices = new Int32Array(kept.length * most);
    kept.forEach((tokens, kvHead) => indices.set(tokens, kvHead * most));
    using selection = stream.device.tensor('i32', ['kvHead', 'kept'], [kept.length, most], indices);
    store.keep(stream, slot, { indices: selection, counts: kept.map(({ length }) => length) });
    heads[slot]?.forEach((head, kvHead) => {
      head.keep(kept[kvHead] ?? []);
    });
    expect(store.denseBlocks([slot])).toBeUndefined();
  }

  it('keeps selected tokens, each kv head its own, and a fork keeps all', async () => {
    const few = await run({ budgetTokens: 1024, deviceBytes: bytesFor({ budgetTokens: 1024 }, slots) });
    await few.step(chunk(0, 0, 900), 'prefill');
    few.copy(0, 1);
    await few.check([...chunk(0, 900, 1), ...chunk(1, 900, 1)], 'decode');
    await keep(few, 0, [range(901).filter((token) => token % 3 === 0), range(901).filter((token) => token % 7 === 1)]);
    expect(few.store.lengths(0)).toEqual([301, 129]);
    for (const each of range(40)) await few.check([...chunk(0, 901 + each, 1), ...chunk(1, 901 + each, 1)], 'decode');
    await few.check(chunk(0, 941, 20), 'prefill');
    await few.check(chunk(0, 961, 1), 'decode');
    await keep(few, 0, [[], [0, 5]]);
    await few.check(chunk(0, 962, 1), 'decode');
  });

  it('scores the blocks of selected tokens by these', async () => {
    const options = { budgetTokens: 160, sinkTokens: 0, localWindow: 0 };
    const answers = async (of: StoreRun<HeldRows>) => {
      const bits: Float32Array[] = [];
      for (const each of range(4)) bits.push(await of.step(chunk(0, 900 + each, 1), 'decode'));
      return bits;
    };
    const [selected, fresh] = [await run(options), await run(options)];
    await selected.step(chunk(0, 0, 70), 'prefill');
    await selected.step(chunk(0, 70, 830), 'prefill');
    await keep(selected, 0, [range(830).map((token) => token + 70), range(830).map((token) => token + 70)]);
    // The same rows, drawn in the same order, those that were not kept in another slot.
    await fresh.step(chunk(1, 0, 70), 'prefill');
    await fresh.step(chunk(0, 70, 830), 'prefill');
    expect(await answers(selected)).toEqual(await answers(fresh));
  });

  it('refuses a step that reads more than the cache has', async () => {
    const least = bytesFor({ budgetTokens: 256 }, 1);
    await expect(run({ budgetTokens: 256, deviceBytes: least - 1 })).rejects.toThrow(OutOfMemoryError);
    const capped = await run({ budgetTokens: 256, deviceBytes: least });
    await capped.step([...chunk(0, 0, 400), ...chunk(1, 0, 400)], 'prefill');
    const { store, stream } = capped;
    using both = createRowBatch(stream.device, stream, [...chunk(0, 400, 1), ...chunk(1, 400, 1)]);
    expect(() => {
      store.prepare(stream, both);
    }).toThrow(OutOfMemoryError);
    await capped.step(chunk(0, 400, 1), 'decode');
    await capped.step(chunk(1, 400, 1), 'decode');
    expect(store.denseBlocks()).toBeUndefined();
  });
});

it('refuses options that are none', () => {
  const wrong: readonly Partial<HierarchicalOptions>[] = [
    { deviceBytes: 0 },
    { deviceBytes: 1.5 },
    { budgetTokens: 127, sinkTokens: 33 },
    { budgetTokens: 2 ** 26 },
    { localWindow: -1 },
    { metadata: 'cuboid' as never },
    { dtype: 'i8' as never },
    { checksums: 1 as never },
    { hostPool: {} as never },
  ];
  for (const options of wrong) {
    expect(() => hierarchicalStore({ deviceBytes: plenty, ...options }), JSON.stringify(options)).toThrow(InvalidValueError);
  }
  expect(hierarchicalStore({ deviceBytes: plenty, budgetTokens: 128 }).name).toBe('hierarchical 128');
  expect(hierarchicalStore({ deviceBytes: plenty }).create([], { device: createDevice({ threads: 1 }), slots: 1, tokensPerSlot: 1, tokens: 1 })).toEqual([]);
});
