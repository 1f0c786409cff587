import { expect, it } from 'vitest';
import { kvPolicy } from '../contracts/kv-policy.js';
import type { KvLayer, KvStore } from '../contracts/kv-store.js';
import { createRowBatch, type RowBatchEntry } from '../contracts/row-batch.js';
import { createDevice } from '../device.js';
import { DisposedError, InvalidValueError, OutOfMemoryError, ShapeError } from '../errors.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { densePagedStore } from './dense-paged-store.js';
import type { Device, Stream, Tensor } from '../handles.js';

const [queryHeads, kvHeads, headDim] = [6, 2, 16];
const scale = 1 / Math.sqrt(headDim);
const layers = [0, 1].map((index) => ({ index, queryHeads, kvHeads, headDim }));

type Rows = Tensor<'f32', readonly ['token', 'head', 'dim']>;

function randomRows(device: Device, random: Random, tokens: number, heads: number): Rows {
  const shape = [tokens, heads, headDim] as const;
  return device.tensor('f32', ['token', 'head', 'dim'], shape, random.elements('f32', tokens * heads * headDim));
}

function asQuery(rows: Rows) {
  return rows.view(['token', 'queryHead', 'dim'], rows.shape);
}

function append(device: Device, stream: Stream, store: KvStore, entries: RowBatchEntry[], keys: Rows, values: Rows) {
  const batch = createRowBatch(device, stream, entries);
  store.prepare(stream, batch);
  const view = (rows: Rows) => rows.view(['token', 'kvHead', 'dim'], rows.shape);
  store.append(stream, { batch, keys: view(keys), values: view(values) });
  store.advance(batch);
  batch.dispose();
}

async function decode(device: Device, stream: Stream, store: KvStore, query: Rows, slots: number[]) {
  const batch = createRowBatch(device, stream, slots.map((slot) => ({ slot, position: 0, rows: 1 })));
  using output = device.tensor('f32', ['token', 'queryHead', 'dim'], query.shape);
  store.startDecode(stream, { batch, query: asQuery(query), output, scale })();
  batch.dispose();
  return await output.read(stream);
}

describeOnDevices('densePagedStore', ({ open }) => {
  const device = open();
  const stream = device.createStream();
  const capacity = { device, slots: 3, tokensPerSlot: 64, tokens: 128 };

  it('answers a batch of sequences like each one alone, however their tokens arrived', async () => {
    const random = new Random(21);
    const factory = densePagedStore({ dtype: 'f32', blockTokens: 8 });
    const caches = [factory.create(layers, capacity), factory.create(layers, capacity)] as const;
    const [[one], [many]] = caches as unknown as [[KvStore], [KvStore]];
    const lengths = [13, 1, 40];
    for (const [slot, tokens] of lengths.entries()) {
      using keys = randomRows(device, random, tokens, kvHeads);
      using values = randomRows(device, random, tokens, kvHeads);
      append(device, stream, one, [{ slot, position: 0, rows: tokens }], keys, values);
      for (let token = 0; token < tokens; token++) {
        using key = randomRows(device, random, 1, kvHeads);
        using value = randomRows(device, random, 1, kvHeads);
        stream.copy(keys.slice('token', token, token + 1), key);
        stream.copy(values.slice('token', token, token + 1), value);
        append(device, stream, many, [{ slot, position: token, rows: 1 }], key, value);
      }
    }
    using query = randomRows(device, random, 3, queryHeads);
    const together = await decode(device, stream, many, query, [2, 0, 1]);
    for (const [row, slot] of [2, 0, 1].entries()) {
      using alone = randomRows(device, random, 1, queryHeads);
      stream.copy(query.slice('token', row, row + 1), alone);
      const size = queryHeads * headDim;
      expect(Array.from(await decode(device, stream, one, alone, [slot]))).toEqual(
        Array.from(together.subarray(row * size, (row + 1) * size)),
      );
    }
    expect(many.lengths(2)).toEqual([40, 40]);
    for (const store of caches.flat()) store.dispose();
  });

  it('reports its true bytes and returns them on keep and release', () => {
    const random = new Random(22);
    const before = device.memory().live;
    const stores = densePagedStore({ dtype: 'f16', blockTokens: 8 }).create(layers, capacity);
    const [, store] = stores as [KvStore, KvStore];
    using keys = randomRows(device, random, 33, kvHeads);
    append(device, stream, store, [{ slot: 0, position: 0, rows: 33 }], keys, keys);
    const blockBytes = 2 * 8 * headDim * 2;
    expect(store.bytes()).toEqual({ device: 5 * kvHeads * blockBytes, host: 0 });
    using indices = device.tensor('i32', ['kvHead', 'kept'], [2, 9], new Int32Array([...Array(9).keys(), ...Array(9).keys()]));
    store.keep(stream, 0, { indices, counts: [9, 3] });
    expect(store.lengths(0)).toEqual([9, 3]);
    expect(store.bytes().device).toBe((2 + 1) * blockBytes);
    store.release(stream, 0);
    expect(store.bytes().device).toBe(0);
    for (const each of stores) each.dispose();
    keys.dispose();
    indices.dispose();
    return stream.synchronize().then(() => {
      expect(device.memory().live).toBe(before);
    });
  });

  it('keeps exactly the selected tokens of each head', async () => {
    const random = new Random(23);
    const stores = densePagedStore({ dtype: 'f32', blockTokens: 4 }).create(layers, capacity);
    const [store, other] = stores as [KvStore, KvStore];
    using keys = randomRows(device, random, 20, kvHeads);
    using values = randomRows(device, random, 20, kvHeads);
    append(device, stream, store, [{ slot: 0, position: 0, rows: 20 }], keys, values);
    const kept = [0, 3, 4, 11, 19];
    using indices = device.tensor('i32', ['kvHead', 'kept'], [2, 5], new Int32Array([...kept, ...kept]));
    store.keep(stream, 0, { indices, counts: [5, 5] });
    for (const token of kept) {
      using key = randomRows(device, random, 1, kvHeads);
      using value = randomRows(device, random, 1, kvHeads);
      stream.copy(keys.slice('token', token, token + 1), key);
      stream.copy(values.slice('token', token, token + 1), value);
      append(device, stream, other, [{ slot: 0, position: token, rows: 1 }], key, value);
    }
    using query = randomRows(device, random, 1, queryHeads);
    expect(await decode(device, stream, store, query, [0])).toEqual(await decode(device, stream, other, query, [0]));
    for (const each of stores) each.dispose();
  });

  it('copies a slot into an empty one, which then goes its own way', async () => {
    const random = new Random(24);
    const [store] = densePagedStore({ dtype: 'f32', blockTokens: 4 }).create(layers, capacity) as [KvStore];
    using document = randomRows(device, random, 21, kvHeads);
    append(device, stream, store, [{ slot: 2, position: 0, rows: 21 }], document, document);
    using indices = device.tensor('i32', ['kvHead', 'kept'], [2, 9], new Int32Array([...Array(9).keys(), ...Array(9).keys()]));
    store.keep(stream, 2, { indices, counts: [9, 3] });
    const { device: once } = store.bytes();
    store.copy?.(stream, 2, 0);
    expect(store.lengths(0)).toEqual([9, 3]);
    // Two blocks are full in the first head, and shared; the last one of each is copied.
    expect(once).toBe((3 + 1) * 2 * 4 * headDim * 4);
    expect(store.bytes().device).toBe((once * 6) / 4);
    for (const slot of [0, 2]) expect(store.bytes([slot]).device).toBe(once);
    using query = randomRows(device, random, 1, queryHeads);
    const before = await decode(device, stream, store, query, [2]);
    expect(await decode(device, stream, store, query, [0])).toEqual(before);

    using more = randomRows(device, random, 5, kvHeads);
    append(device, stream, store, [{ slot: 0, position: 21, rows: 5 }], more, more);
    expect(await decode(device, stream, store, query, [2])).toEqual(before);
    const continued = await decode(device, stream, store, query, [0]);
    store.release(stream, 2);
    using others = randomRows(device, random, 40, kvHeads);
    append(device, stream, store, [{ slot: 1, position: 0, rows: 40 }], others, others);
    expect(await decode(device, stream, store, query, [0])).toEqual(continued);
    expect(() => store.copy?.(stream, 0, 1)).toThrow(InvalidValueError);
  });

  it('has no fewer blocks after a copy for which the device had no room', async () => {
    const small = createDevice({ kind: device.kind, threads: 1, memoryLimit: 1_000_000 });
    const own = small.createStream();
    const [store] = densePagedStore({ blockTokens: 8 }).create(layers, { ...capacity, device: small }) as [KvStore];
    {
      using rows = randomRows(small, new Random(25), 41, kvHeads);
      append(small, own, store, [{ slot: 0, position: 0, rows: 41 }], rows, rows);
    }
    await own.synchronize();
    const rest = small.tensor('u8', ['byte'], [1_000_000 - small.memory().live]);
    // As often as would use up the blocks that are left.
    for (let attempt = 0; attempt < 200; attempt++) {
      expect(() => store.copy?.(own, 0, 1)).toThrow(OutOfMemoryError);
    }
    rest.dispose();
    store.copy?.(own, 0, 1);
    expect(store.lengths(1)).toEqual([41, 41]);
    await own.synchronize();
    store.dispose();
  });

  it('refuses what does not fit, and changes nothing', async () => {
    const stores = densePagedStore({ blockTokens: 8 }).create(layers, { ...capacity, tokens: 64 });
    const [store] = stores as [KvStore];
    const prepare = (slot: number, rows: number) => {
      const batch = createRowBatch(device, stream, [{ slot, position: 0, rows }]);
      try {
        store.prepare(stream, batch);
      } finally {
        batch.dispose();
      }
    };
    expect(() => prepare(0, 65)).toThrow(InvalidValueError);
    expect(() => prepare(3, 1)).toThrow(InvalidValueError);
    prepare(0, 64);
    prepare(1, 64);
    prepare(2, 48);
    const { device: held } = store.bytes();
    expect(() => prepare(2, 64)).toThrow(OutOfMemoryError);
    expect(store.bytes().device).toBe(held);
    for (const each of stores) each.dispose();
    await stream.synchronize();
  });

  it('counts the rows of a step when told, not when they are appended', async () => {
    const stores = densePagedStore({ dtype: 'f32', blockTokens: 8 }).create(layers, capacity);
    const [store] = stores as [KvStore];
    const batch = createRowBatch(device, stream, [
      { slot: 0, position: 0, rows: 7 },
      { slot: 2, position: 0, rows: 2 },
    ]);
    using rows = randomRows(device, new Random(24), 9, kvHeads);
    const keys = rows.view(['token', 'kvHead', 'dim'], rows.shape);
    store.prepare(stream, batch);
    store.append(stream, { batch, keys, values: keys });
    expect(store.lengths(0)).toEqual([0, 0]);
    store.advance(batch);
    expect([store.lengths(0), store.lengths(1), store.lengths(2)]).toEqual([[7, 7], [0, 0], [2, 2]]);
    expect(await store.denseBlocks()?.keyCounts.read(stream)).toEqual(new Int32Array([7, 7, 0, 0, 2, 2]));
    batch.dispose();
    for (const each of stores) each.dispose();
  });

  it('refuses rows that it was not prepared for, and enqueues nothing then', async () => {
    const [store] = densePagedStore({ dtype: 'f32', blockTokens: 8 }).create(layers, capacity) as [KvStore];
    const random = new Random(26);
    using rows = randomRows(device, random, 13, kvHeads);
    append(device, stream, store, [{ slot: 1, position: 0, rows: 13 }], rows, rows);
    using query = randomRows(device, random, 1, queryHeads);
    const before = await decode(device, stream, store, query, [1]);
    const appendAlone = (slot: number, count: number) => {
      const batch = createRowBatch(device, stream, [{ slot, position: 0, rows: count }]);
      const keys = rows.slice('token', 0, count).view(['token', 'kvHead', 'dim'], [count, kvHeads, headDim]);
      try {
        store.append(stream, { batch, keys, values: keys });
      } finally {
        batch.dispose();
      }
    };
    // Slots without blocks, where those of others would be written, and past the end of a block.
    for (const [slot, count] of [[0, 1], [2, 13], [1, 4]] as const) {
      expect(() => appendAlone(slot, count)).toThrow(InvalidValueError);
    }
    expect(await decode(device, stream, store, query, [1])).toEqual(before);
    // In the block that the slot has there is room for three.
    appendAlone(1, 3);
    store.release(stream, 1);
    expect(() => appendAlone(1, 1)).toThrow(InvalidValueError);
    await stream.synchronize();
    store.dispose();
    expect(() => appendAlone(1, 1)).toThrow(DisposedError);
  });

  it('gives everything back when it does not fit', async () => {
    const small = createDevice({ kind: device.kind, threads: 1, memoryLimit: 1_000_000 });
    const factory = densePagedStore({ blockTokens: 8 });
    const own = { ...capacity, device: small };
    const stores = factory.create(layers, own);
    const needed = small.memory().live;
    for (const store of stores) store.dispose();
    await small.defaultStream.synchronize();
    // The last two tables of the last layer are the last to be made, of 192 and 24 bytes.
    for (const missing of [1, 24, 25, 216, 217, 432, 433, needed / 2, needed]) {
      using rest = small.tensor('u8', ['byte'], [1_000_000 - needed + missing]);
      expect(() => factory.create(layers, own)).toThrow(OutOfMemoryError);
      await small.defaultStream.synchronize();
      expect(small.memory().live).toBe(rest.byteLength);
    }
    // A table that no array could fill.
    const endless = { ...own, slots: 1024, tokensPerSlot: 2 ** 31 - 1 };
    const ofTable = expect.objectContaining({ code: 'KV_OUT_OF_MEMORY', subject: 'table' }) as Error;
    expect(() => densePagedStore({ blockTokens: 1 }).create(layers, endless)).toThrow(ofTable);
    await small.defaultStream.synchronize();
    expect(small.memory().live).toBe(0);
  });

  it('refuses capacities and heads that are none', () => {
    const create = (wrong: object, head: object = {}) =>
      densePagedStore().create([{ ...layers[0], ...head } as KvLayer, layers[1] as KvLayer], { ...capacity, ...wrong });
    for (const name of ['slots', 'tokensPerSlot', 'tokens', 'batchRows']) {
      for (const given of [0, -1, 1.5, NaN, Infinity]) expect(() => create({ [name]: given })).toThrow(InvalidValueError);
      expect(() => create({ [name]: 2 ** 53 })).toThrow(InvalidValueError);
    }
    for (const name of ['slots', 'tokensPerSlot']) {
      for (const given of [2 ** 31, 1e15]) expect(() => create({ [name]: given })).toThrow(InvalidValueError);
    }
    for (const given of [0, -2, 4, 1.5, NaN]) expect(() => create({}, { kvHeads: given })).toThrow(ShapeError);
    expect(() => create({}, { headDim: 32 })).toThrow(ShapeError);
  });

  it('is disposed once, however often it is said', async () => {
    const [one, other] = densePagedStore().create(layers, capacity) as [KvStore, KvStore];
    one.dispose();
    one.dispose();
    using rows = randomRows(device, new Random(3), 4, kvHeads);
    append(device, stream, other, [{ slot: 0, position: 0, rows: 4 }], rows, rows);
    await stream.synchronize();
    other.dispose();
  });

  it('is what kvPolicy() stands for', () => {
    expect(kvPolicy().name).toBe('dense');
    expect(kvPolicy({ store: densePagedStore({ dtype: 'f32' }) }).name).toBe('dense + dense f32');
    expect(() => densePagedStore({ blockTokens: 0 })).toThrow(InvalidValueError);
  });
});
