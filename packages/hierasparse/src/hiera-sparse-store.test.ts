import { CapabilityError, createDevice, createRowBatch, densePagedStore, densePrefill, DeviceError } from '@kv/sparse-core';
import { DisposedError, DTypeError, InvalidValueError, OutOfMemoryError, ShapeError } from '@kv/sparse-core';
import type { KvCapacity, KvLayer, KvStore } from '@kv/sparse-core';
import { describeOnDeviceKinds, Random, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import type { Shares } from './block-sparsity.js';
import { hieraSparsePrefill } from './hiera-sparse-prefill.js';
import { hieraSparseStore, type HieraSparseOptions } from './hiera-sparse-store.js';
import type { BlockLoss, KvOperand } from './blocks-24.js';
import type { HeadOracle } from './testing/store-oracle.js';
import { StoreRun } from './testing/store-run.js';

const layer: KvLayer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };
const [sinkTokens, localWindow, slots, group] = [64, 128, 3, 2];
const tokensPerSlot = 1024;

const chunk = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
const range = (length: number) => Array.from({ length }, (_, index) => index);

describeOnDeviceKinds('hieraSparseStore', ({ open }: TestDevice) => {
  function run(options: HieraSparseOptions, prefill = densePrefill(), seed = 1, tokens = slots * tokensPerSlot) {
    const device = open();
    const factory = hieraSparseStore({ sinkTokens, localWindow, dtype: 'f16', ...options });
    const capacity = { device, slots, tokensPerSlot, tokens, batchRows: 700, prefill };
    const [store] = factory.create([layer], capacity) as [KvStore];
    return new StoreRun(store, prefill, { device, random: new Random(seed), dtype: 'f16', slots, group });
  }
  const pruneTo = (keys: number, values: number) => (head: HeadOracle) => {
    head.prune({ keys, values }, sinkTokens / 64, localWindow);
  };

  it.each([
    { prefill: { keys: 0, values: 1 }, decode: { keys: 0, values: 1 } },
    { prefill: { keys: 0.5, values: 0.5 }, decode: { keys: 0.5, values: 0.5 } },
    { prefill: { keys: 1, values: 1 }, decode: { keys: 1, values: 1 } },
    { prefill: { keys: 0.25, values: 0.5 }, decode: { keys: 0.5, values: 1 } },
    { prefill: { keys: 0, values: 0 }, decode: { keys: 1, values: 0.4 } },
  ])('holds what the oracle does: $prefill in prompts, $decode after', async ({ prefill, decode }) => {
    const steps = run(decode, hieraSparsePrefill(prefill));
    const pruneChunk = pruneTo(prefill.keys, prefill.values);
    // Two prompts in turns, in chunks that end within blocks.
    await steps.check(chunk(0, 0, 300), 'prefill', pruneChunk);
    await steps.check(chunk(2, 0, 70), 'prefill', pruneChunk);
    await steps.check([...chunk(0, 300, 270), ...chunk(2, 70, 410)], 'prefill', pruneChunk);
    for (const slot of [0, 2]) steps.finishPrefill(slot, pruneTo(decode.keys, decode.values));
    // Answers cross the end of a block, behind which another leaves the local window.
    const pruneStep = pruneTo(decode.keys, decode.values);
    for (const step of range(8)) {
      await steps.check([...chunk(2, 480 + step, 1), ...chunk(0, 570 + step, 1)], 'decode', pruneStep);
    }
    const bytes = steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0);
    expect(steps.store.bytes()).toEqual({ device: bytes, host: 0 });
    expect(steps.store.lengths(0)).toEqual([578, 578]);
  });

  it('is the dense store, bit for bit, when nothing is sparse', async () => {
    const device = open();
    const [store] = densePagedStore({ dtype: 'f16' }).create([layer], { device, slots, tokensPerSlot, tokens: 3072 }) as [KvStore];
    const dense = new StoreRun(store, densePrefill(), { device, random: new Random(1), dtype: 'f16', slots, group });
    const hiera = run({}, hieraSparsePrefill({}));
    const results = [];
    for (const steps of [dense, hiera]) {
      const bits = [await steps.step(chunk(1, 0, 500), 'prefill'), await steps.step(chunk(1, 500, 33), 'prefill')];
      steps.finishPrefill(1);
      results.push([...bits, await steps.step(chunk(1, 533, 1), 'decode')]);
    }
    expect(results[1]).toEqual(results[0]);
  });

  it('compresses by the ratio of equation 6', async () => {
    for (const [keys, values, ratio] of [[1, 1, 1.78], [0.5, 1, 1.49]] as const) {
      const steps = run({ keys, values, sinkTokens: 0, localWindow: 0 });
      await steps.step(chunk(0, 0, 1024), 'prefill');
      steps.finishPrefill(0);
      const dense = 2 * 2 * 1024 * 64 * 2;
      const exact = 1 / (1 - 0.21875 * (keys + values) + 2 / (64 * 64));
      expect(dense / steps.store.bytes().device).toBeCloseTo(exact, 12);
      expect(exact).toBeCloseTo(ratio, 2);
    }
  });

  it('ends a prompt with the same blocks sparse, read so or dense, when all are', async () => {
    const sparse = run({ keys: 1, values: 1 }, hieraSparsePrefill({ keys: 1, values: 1 }));
    const dense = run({ keys: 1, values: 1 });
    for (const steps of [sparse, dense]) {
      await steps.step(chunk(0, 0, 700), 'prefill');
      steps.finishPrefill(0);
    }
    expect(await sparse.step(chunk(0, 700, 1), 'decode')).toEqual(await dense.step(chunk(0, 700, 1), 'decode'));
  });

  it('leaves 64 tokens of sinks and 256 of local window dense if nothing else is asked for', async () => {
    const device = open();
    const [store] = hieraSparseStore({ keys: 1 }).create([layer], { device, slots, tokensPerSlot, tokens: 1024 }) as [KvStore];
    const steps = new StoreRun(store, densePrefill(), { device, random: new Random(1), dtype: 'f16', slots, group });
    await steps.step(chunk(0, 0, 64 + 3 * 64 + 256 + 63), 'prefill');
    steps.finishPrefill(0, (head) => head.prune({ keys: 1, values: 0 }, 1, 256));
    await steps.check(chunk(0, 575, 1), 'decode');
    const dense = 2 * 64 * 64 * 2 + 2 * 4;
    // Of nine blocks of each head three lose 7/16 of their keys.
    expect(store.bytes().device).toBe(2 * (9 * dense - 3 * 64 * 64 * 2 * (7 / 16)));
  });

  it('gives its memory back, and serves others from it', async () => {
    // Room for one sequence and a bit.
    const steps = run({ keys: 0.5, values: 1 }, hieraSparsePrefill({ keys: 0.5, values: 0.5 }), 3, 700);
    for (const round of range(4)) {
      const slot = round % slots;
      await steps.check(chunk(slot, 0, 400), 'prefill', pruneTo(0.5, 0.5));
      await steps.check(chunk(slot, 400, 250), 'prefill', pruneTo(0.5, 0.5));
      steps.finishPrefill(slot, pruneTo(0.5, 1));
      await steps.check(chunk(slot, 650, 1), 'decode');
      await expect(steps.step(chunk((slot + 1) % slots, 0, 460), 'prefill')).rejects.toThrow(OutOfMemoryError);
      steps.release(slot);
      steps.release((slot + 1) % slots);
      expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
    }
  });

  it('has room for every prompt that it admits to become sparse', async () => {
    // What becomes sparse returns dense blocks, but sparse ones are there for 640 tokens and a block a slot.
    const everything = { keys: 1, values: 1, sinkTokens: 0, localWindow: 0 };
    const steps = run(everything, densePrefill(), 1, 640);
    const all = { keys: 1, values: 1 };
    await steps.check(chunk(0, 0, 640), 'prefill');
    steps.finishPrefill(0, (head) => head.prune(all, 0, 0));
    await expect(steps.step(chunk(1, 0, 320), 'prefill')).rejects.toThrow(OutOfMemoryError);
    steps.release(1);
    await steps.check(chunk(1, 0, 192), 'prefill');
    steps.finishPrefill(1, (head) => head.prune(all, 0, 0));
    await expect(steps.step(chunk(2, 0, 1), 'decode')).rejects.toThrow(OutOfMemoryError);
    steps.release(2);
    steps.release(0);
    await steps.check(chunk(2, 0, 640), 'prefill');
    steps.finishPrefill(2, (head) => head.prune(all, 0, 0));
  });

  it('keeps a selection of a dense prompt, and makes it sparse then', async () => {
    const steps = run({ keys: 1, values: 1 });
    await steps.check(chunk(1, 0, 600), 'prefill');
    expect(steps.store.denseBlocks()).toBeDefined();
    const kept = [range(600).filter((token) => token % 5 > 0), range(600).filter((token) => token % 3 > 0)];
    const indices = new Int32Array(2 * 480);
    kept.forEach((tokens, head) => indices.set(tokens, head * 480));
    const { device } = steps.stream;
    using selection = device.tensor('i32', ['kvHead', 'kept'], [2, 480], indices);
    steps.store.keep(steps.stream, 1, { indices: selection, counts: [480, 400] });
    kept.forEach((tokens, head) => steps.heads[1]?.[head]?.keep(tokens));
    steps.finishPrefill(1, pruneTo(1, 1));
    for (const step of range(3)) await steps.check(chunk(1, 600 + step, 1), 'decode');
    expect(steps.store.lengths(1)).toEqual([483, 403]);
    expect(steps.store.bytes().device).toBe(steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));

    // Now blocks are sparse.
    expect(steps.store.denseBlocks()).toBeUndefined();
    expect(steps.store.denseBlocks([1])).toBeUndefined();
    expect(steps.store.denseBlocks([0, 2])).toBeDefined();
    expect(() => steps.store.keep(steps.stream, 1, { indices: selection, counts: [1, 1] })).toThrow(CapabilityError);
  });

  it('reads, selects from and makes sparse again what a turn before has made sparse', async () => {
    for (const share of [1, 0.5]) {
      const steps = run({ keys: share, values: share });
      await steps.check(chunk(0, 0, 200), 'prefill');
      const turns = [
        { tokens: 900, kept: [(token: number) => token % 5 > 0, (token: number) => token % 3 > 0] },
        { tokens: 130, kept: [(token: number) => token % 4 > 0, (token: number) => token % 7 > 0] },
        { tokens: 1, kept: [(token: number) => token % 2 > 0, (token: number) => token % 9 > 0] },
      ];
      let position = 0;
      for (const { tokens, kept } of turns) {
        for (let rest = tokens; rest > 0; rest -= 300) {
          // What leaves the local window after the first turn is made sparse before a step.
          if (position > 900) steps.heads[1]?.forEach(pruneTo(share, share));
          await steps.check(chunk(1, position, Math.min(300, rest)), 'prefill');
          position += Math.min(300, rest);
        }
        (await steps.store.makeDense?.(steps.stream, 1))?.();
        expect(steps.store.denseBlocks([1])).toBeDefined();
        const heads = steps.heads[1] ?? [];
        const chosen = heads.map((head, index) => range(head.count).filter((token) => kept[index]?.(token)));
        const most = Math.max(...chosen.map(({ length }) => length));
        const indices = new Int32Array(2 * most);
        chosen.forEach((list, head) => indices.set(list, head * most));
        using selection = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [2, most], indices);
        steps.store.keep(steps.stream, 1, { indices: selection, counts: chosen.map(({ length }) => length) });
        heads.forEach((head, index) => {
          head.makeDense();
          head.keep(chosen[index] ?? []);
        });
        steps.finishPrefill(1, pruneTo(share, share));
        expect(steps.store.denseBlocks([1])).toBeUndefined();
        for (const step of range(3)) await steps.check(chunk(1, position + step, 1), 'decode', pruneTo(share, share));
        position += 3;
        expect(steps.store.bytes().device).toBe(steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));
      }
      steps.release(1);
      steps.release(0);
      expect(steps.store.bytes()).toEqual({ device: 0, host: 0 });
    }
  });

  it('forgets the newest tokens, and refuses to where blocks may be sparse', async () => {
    const steps = run({ keys: 1, values: 1 });
    await steps.check(chunk(1, 0, 600), 'prefill');
    steps.finishPrefill(1, pruneTo(1, 1));
    for (const step of range(45)) await steps.check(chunk(1, 600 + step, 1), 'decode', pruneTo(1, 1));
    // The block that the tokens from 640 on had begun is back.
    steps.store.truncate(steps.stream, 1, 10);
    for (const head of steps.heads[1] ?? []) head.truncate(10);
    expect(steps.store.lengths(1)).toEqual([635, 635]);
    expect(steps.store.bytes().device).toBe(steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));
    for (const step of range(7)) await steps.check(chunk(1, 635 + step, 1), 'decode', pruneTo(1, 1));
    expect(() => {
      steps.store.truncate(steps.stream, 1, 600);
    }).toThrow(CapabilityError);
    expect(() => {
      steps.store.truncate(steps.stream, 1, 700);
    }).toThrow(InvalidValueError);
    expect(steps.store.lengths(1)).toEqual([642, 642]);
  });

  it('copies a dense prompt, which then goes its own way', async () => {
    const steps = run({ keys: 1, values: 1 });
    await steps.check(chunk(0, 0, 330), 'prefill');
    steps.copy(0, 2);
    steps.finishPrefill(2, pruneTo(1, 1));
    await steps.check(chunk(2, 330, 1), 'decode');
    steps.release(2);
    await steps.check(chunk(2, 0, 200), 'prefill');
    await steps.check(chunk(0, 330, 40), 'prefill');
    expect(() => steps.copy(0, 2)).toThrow(InvalidValueError);
  });

  it.each([
    { prefill: { values: 1 }, decode: { values: 1 } },
    { prefill: { values: 1 }, decode: { keys: 1, values: 1 } },
    { prefill: {}, decode: { values: 1 } },
    { prefill: {}, decode: { keys: 1, values: 1 } },
    { prefill: {}, decode: { keys: 0.5, values: 0.5 } },
    { prefill: { keys: 0.5, values: 0.5 }, decode: { keys: 0.5, values: 0.5 } },
    { prefill: { keys: 0.25, values: 1 }, decode: { keys: 0.5, values: 1 } },
  ] satisfies Record<string, Partial<Shares>>[])('copies a sparse prompt, which then goes its own way: $prefill in prompts, $decode after', async (sparsity) => {
    const steps = run(sparsity.decode, hieraSparsePrefill(sparsity.prefill));
    const prune = ({ keys = 0, values = 0 }: Partial<Shares>) => pruneTo(keys, values);
    const [pruneChunk, pruneStep] = [prune(sparsity.prefill), prune(sparsity.decode)];
    await steps.check(chunk(0, 0, 400), 'prefill', pruneChunk);
    steps.copy(0, 1);
    await steps.check([...chunk(0, 400, 40), ...chunk(1, 400, 90)], 'prefill', pruneChunk);
    for (const slot of [0, 1]) steps.finishPrefill(slot, pruneStep);
    const once = steps.store.bytes().device;
    steps.copy(1, 2);
    // Of 490 tokens the last block of each head is copied, and eight of keys and of values are named once more.
    expect(steps.store.bytes().device - once).toBe(2 * (2 * 64 * 64 * 2 + 2 * 8 * 4));
    expect(steps.store.bytes([2]).device).toBe(steps.heads[1]?.reduce((sum, head) => sum + head.bytes(), 0));
    steps.release(1);
    await steps.check(chunk(1, 0, 200), 'prefill', pruneChunk);
    for (const step of range(3)) {
      await steps.check([...chunk(2, 490 + step, 1), ...chunk(0, 440 + step, 1)], 'decode', pruneStep);
    }
    for (const slot of [0, 1, 2]) steps.release(slot);
    expect(steps.store.bytes().device).toBe(0);
  });

  it('reads a second prompt as sparse as the first, behind what is sparser by now', async () => {
    const steps = run({ keys: 1, values: 1 }, hieraSparsePrefill({ values: 1 }));
    await steps.check(chunk(0, 0, 400), 'prefill', pruneTo(0, 1));
    steps.finishPrefill(0, pruneTo(1, 1));
    for (const position of [400, 650]) {
      steps.heads[0]?.forEach(pruneTo(1, 1));
      await steps.check(chunk(0, position, 250), 'prefill', pruneTo(0, 1));
    }
    await steps.check(chunk(0, 900, 1), 'decode', pruneTo(1, 1));
    expect(steps.store.bytes().device).toBe(steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));
  });

  it('refuses by name what it cannot do', async () => {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: 1024 };
    expect(() => hieraSparseStore({ keys: 1.5 })).toThrow(InvalidValueError);
    expect(() => hieraSparseStore({ sinkTokens: -1 })).toThrow(InvalidValueError);
    expect(() => hieraSparsePrefill({ values: NaN })).toThrow(InvalidValueError);
    for (const keys of ['0.5', () => '0.5', () => undefined, {}]) {
      expect(() => hieraSparseStore({ keys: keys as never })).toThrow(InvalidValueError);
    }
    expect(() => hieraSparseStore({ dtype: 'f32' as never })).toThrow(DTypeError);
    expect(() => hieraSparseStore().create([{ ...layer, headDim: 96 }], capacity)).toThrow(CapabilityError);
    const [dense] = densePagedStore().create([layer], capacity) as [KvStore];
    const prefill = hieraSparsePrefill({ keys: 1 });
    const other = new StoreRun(dense, prefill, { device, random: new Random(1), dtype: 'f16', slots, group });
    await expect(other.step(chunk(0, 0, 4), 'prefill')).rejects.toThrow(CapabilityError);
    expect(() => run({ keys: 0.5 }, prefill)).toThrow(CapabilityError);
    const [unaware] = hieraSparseStore({ keys: 1 }).create([layer], capacity) as [KvStore];
    const steps = new StoreRun(unaware, prefill, { device, random: new Random(1), dtype: 'f16', slots, group });
    await expect(steps.step(chunk(0, 0, 4), 'prefill')).rejects.toThrow(CapabilityError);
    await expect(run({}).step(chunk(0, 0, 2000), 'prefill')).rejects.toThrow(InvalidValueError);
  });

  it('refuses streams of another device, and changes nothing then', async () => {
    const { store, stream } = run({ keys: 1, values: 1 });
    const other = createDevice({ kind: 'cpu', threads: 1 });
    const foreign = other.createStream();
    const batch = createRowBatch(other, foreign, chunk(0, 0, 640));
    expect(() => store.prepare(foreign, batch)).toThrow(DeviceError);
    expect(() => store.finishPrefill?.(foreign, 0)).toThrow(DeviceError);
    expect(() => store.copy?.(foreign, 0, 1)).toThrow(DeviceError);
    expect(() => store.release(foreign, 0)).toThrow(DeviceError);
    expect(store.bytes().device).toBe(0);
    // All of the room is there still.
    const all = range(slots).map((slot) => ({ slot, position: 0, rows: tokensPerSlot }));
    store.prepare(stream, createRowBatch(stream.device, stream, all));
    await stream.synchronize();
  });

  it('is disposed once, however often it is said, and says so afterwards', async () => {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: 1024 };
    const [first, second] = hieraSparseStore({ keys: 1, localWindow }).create([layer, { ...layer, index: 1 }], capacity) as [
      KvStore,
      KvStore,
    ];
    const options = { device, random: new Random(1), dtype: 'f16', slots, group } as const;
    const [disposed, alive] = [first, second].map((store) => new StoreRun(store, densePrefill(), options)) as [StoreRun, StoreRun];
    await disposed.check(chunk(0, 0, 300), 'prefill');
    first.dispose();
    first.dispose();
    await expect(disposed.step(chunk(0, 300, 1), 'decode')).rejects.toThrow(DisposedError);
    expect(() => first.finishPrefill?.(disposed.stream, 0)).toThrow(DisposedError);
    await alive.check(chunk(0, 0, 300), 'prefill');
    second.dispose();
  });

  it('refuses rows that it was not prepared for, and enqueues nothing then', async () => {
    const steps = run({ keys: 1, values: 0.5 }, hieraSparsePrefill({ values: 0.5 }));
    const { store, stream } = steps;
    await steps.check(chunk(1, 0, 500), 'prefill', pruneTo(0, 0.5));
    using rows = stream.device.tensor('f16', ['token', 'kvHead', 'dim'], [13, 2, 64], new Uint16Array(13 * 2 * 64));
    // Slots without blocks, where those of others would be written, and past the end of a block.
    for (const slot of range(slots)) {
      const batch = createRowBatch(stream.device, stream, chunk(slot, store.lengths(slot)[0] ?? 0, 13));
      expect(() => store.append(stream, { batch, keys: rows, values: rows })).toThrow(InvalidValueError);
      batch.dispose();
    }
    steps.finishPrefill(1, pruneTo(1, 0.5));
    await steps.check(chunk(1, 500, 1), 'decode', pruneTo(1, 0.5));
    store.dispose();
    const batch = createRowBatch(stream.device, stream, chunk(1, 501, 13));
    expect(() => store.append(stream, { batch, keys: rows, values: rows })).toThrow(DisposedError);
  });

  it('gives everything back when it does not fit', async () => {
    const { kind } = open();
    const device = createDevice({ kind, threads: 1, memoryLimit: 50_000_000 });
    const factory = hieraSparseStore({ keys: 0.5, values: 1, elementMask: () => new Uint8Array(2 * 64 * 64) });
    const capacity = { device, slots, tokensPerSlot, tokens: 1024, prefill: hieraSparsePrefill({ keys: 0.5 }) };
    const layers = [layer, { ...layer, index: 1 }];
    const stores = factory.create(layers, capacity);
    const needed = device.memory().live;
    for (const store of stores) store.dispose();
    await device.defaultStream.synchronize();
    // Of a layer two masks of 8,192 bytes, two index maps of 384, and counts of 24, made in this order.
    const ofLayer = [1, 24, 25, 408, 409, 792, 793, 792 + 8192, 793 + 8192];
    for (const missing of [...ofLayer, ...ofLayer.map((bytes) => 792 + 2 * 8192 + bytes), needed / 2, needed]) {
      using rest = device.tensor('u8', ['byte'], [50_000_000 - needed + missing]);
      expect(() => factory.create(layers, capacity)).toThrow(OutOfMemoryError);
      await device.defaultStream.synchronize();
      expect(device.memory().live).toBe(rest.byteLength);
    }
    // An index map that no array could fill.
    const endless = { ...capacity, slots: 1024, tokensPerSlot: 2 ** 31 - 1, prefill: densePrefill() };
    const ofTable = expect.objectContaining({ code: 'KV_OUT_OF_MEMORY', subject: 'table' }) as Error;
    expect(() => hieraSparseStore().create([layer], endless)).toThrow(ofTable);
    await device.defaultStream.synchronize();
    expect(device.memory().live).toBe(0);
  });

  it('refuses masks that do not fit when it is created, and keeps no memory then', () => {
    const device = open();
    const capacity = { device, slots, tokensPerSlot, tokens: 1024 };
    const before = device.memory().live;
    const ofSecond = (kept: Uint8Array) =>
      hieraSparseStore({ keys: 1, elementMask: ({ index }) => (index === 0 ? new Uint8Array(2 * 64 * 64) : kept) });
    const layers = [layer, { ...layer, index: 1 }];
    const oneHead = new Uint8Array(64 * 64);
    expect(() => ofSecond(oneHead).create(layers, capacity)).toThrow(ShapeError);
    const tooMany = new Uint8Array(2 * 64 * 64).fill(1);
    expect(() => ofSecond(tooMany).create(layers, capacity)).toThrow(CapabilityError);
    expect(() => ofSecond(null as never).create(layers, capacity)).toThrow(DTypeError);
    expect(device.memory().live).toBe(before);
  });

  it("makes the blocks sparse that lose the least by a measure of one's own", async () => {
    const random = new Random(12);
    const width = tokensPerSlot / 64;
    const numbers = () => Float32Array.from({ length: slots * 2 * width }, () => random.integer(-9, 9));
    const given = { keys: numbers(), values: numbers() };
    const tensors: Partial<Record<KvOperand, BlockLoss>> = {};
    const shares = { keys: 0.5, values: 0.25 };
    const blockLoss = (_: KvLayer, operand: KvOperand, capacity: KvCapacity) =>
      (tensors[operand] = capacity.device.tensor('f32', ['slot', 'kvHead', 'block'], [slots, 2, width], given[operand]));
    const steps = run({ ...shares, blockLoss }, hieraSparsePrefill(shares));
    const prune = (head: HeadOracle) => {
      const row = steps.heads.flat().indexOf(head);
      const lossOf = (operand: KvOperand, block: number) => given[operand][row * width + block] ?? NaN;
      head.prune(shares, sinkTokens / 64, localWindow, lossOf);
    };
    await steps.check(chunk(0, 0, 500), 'prefill', prune);
    await steps.check([...chunk(0, 500, 90), ...chunk(2, 0, 600)], 'prefill', prune);
    // What comes next goes by other losses.
    given.keys = numbers();
    if (tensors.keys) steps.stream.write(tensors.keys, given.keys);
    await steps.check([...chunk(0, 590, 200), ...chunk(2, 600, 60)], 'prefill', prune);
    for (const slot of [0, 2]) steps.finishPrefill(slot, prune);
    for (const step of range(3)) {
      await steps.check([...chunk(0, 790 + step, 1), ...chunk(2, 660 + step, 1)], 'decode', prune);
    }
  });

  it('refuses losses that do not fit when it is created, and keeps no memory then', () => {
    const device = open();
    const axes = ['slot', 'kvHead', 'block'] as const;
    const capacity = { device, slots, tokensPerSlot, tokens: 1024 };
    using tooShort = device.tensor('f32', axes, [slots, 2, 15]);
    using integers = device.tensor('i32', axes, [slots, 2, 16]);
    using foreign = createDevice({ kind: 'cpu', threads: 1 }).tensor('f32', axes, [slots, 2, 16]);
    const disposed = device.tensor('f32', axes, [slots, 2, 16]);
    disposed.dispose();
    const before = device.memory().live;
    const create = (loss: unknown) => () =>
      hieraSparseStore({ keys: 0.5, blockLoss: () => loss as BlockLoss }).create([layer], capacity);
    expect(create(tooShort)).toThrow(ShapeError);
    expect(create(integers)).toThrow(DTypeError);
    expect(create(foreign)).toThrow(DeviceError);
    expect(create(disposed)).toThrow(DisposedError);
    expect(device.memory().live).toBe(before);
  });

  it('refuses losses that were disposed since, and changes nothing then', async () => {
    const losses: BlockLoss[] = [];
    const blockLoss = (_: KvLayer, __: KvOperand, { device }: KvCapacity) => {
      const loss = device.tensor('f32', ['slot', 'kvHead', 'block'], [slots, 2, 16], new Float32Array(slots * 2 * 16));
      losses.push(loss);
      return loss;
    };
    const steps = run({ keys: 1, values: 1, blockLoss });
    const { store, stream } = steps;
    await steps.step(chunk(0, 0, 640), 'prefill');
    for (const loss of losses) loss.dispose();
    const before = [store.bytes(), store.lengths(0)];
    expect(() => store.finishPrefill?.(stream, 0)).toThrow(DisposedError);
    expect([store.bytes(), store.lengths(0)]).toEqual(before);
    await expect(steps.step(chunk(0, 640, 1), 'decode')).rejects.toThrow(DisposedError);
    expect([store.bytes(), store.lengths(0)]).toEqual(before);
  });

  it('takes another sparsity for each layer, and a mask of elements', async () => {
    const device = open();
    const layers = [layer, { ...layer, index: 1 }];
    const first = new Uint8Array(2 * 64 * 64).map((_, index) => (index % 4 < 2 ? 1 : 0));
    const factory = hieraSparseStore({
      keys: (index) => index,
      values: 0,
      sinkTokens: 0,
      localWindow: 0,
      elementMask: (_, operand) => (operand === 'keys' ? first : undefined),
    });
    expect(factory.name).toBe('hierasparse S_K by layer');
    const stores = factory.create(layers, { device, slots, tokensPerSlot, tokens: 1024 });
    const bytes = [];
    for (const store of stores) {
      const options = { device, random: new Random(1), dtype: 'f16', slots, group } as const;
      const steps = new StoreRun(store, densePrefill(), options);
      await steps.step(chunk(0, 0, 640), 'prefill');
      steps.finishPrefill(0, (head) => {
        const kept = (_: KvOperand, block: Uint16Array) => block.map((element, index) => (first[index] === 0 ? 0 : element));
        head.prune({ keys: store.layer.index, values: 0 }, 0, 0, undefined, kept);
      });
      await steps.check(chunk(0, 640, 1), 'decode');
      bytes.push(store.bytes().device);
      const dims = await store.denseBlocks()?.keyCounts.read(steps.stream);
      expect(dims?.[0]).toBe(store.layer.index === 0 ? 641 : undefined);
    }
    const dense = 2 * 2 * 11 * 64 * 64 * 2 + 2 * 2 * 11 * 4;
    expect(bytes).toEqual([dense, dense - 2 * 10 * 64 * 64 * 2 * (7 / 16)]);
    for (const store of stores) store.dispose();
  });
});
