import { expect, it } from 'vitest';
import type { FloatDType } from '../dtype.js';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import { decode, encode, Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { appendKv } from './append-kv.js';
import { rope } from './rope.js';

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];

describeOnDevices('appendKv', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  /** An empty cache of `slots` slots, each of `width` blocks a head, in random order. */
  function emptyCache(random: Random, dtype: FloatDType, slots: number, kvHeads: number, dim: number) {
    const [blockTokens, width] = [random.integer(1, 9), 12];
    const order = random.permutation(slots * kvHeads * width);
    const shape = [order.length, blockTokens, dim] as const;
    const untouched = encode(dtype, new Float64Array(order.length * blockTokens * dim).fill(NaN));
    const blocks = {
      keys: device.tensor(dtype, ['block', 'blockToken', 'dim'], shape, untouched),
      values: device.tensor(dtype, ['block', 'blockToken', 'dim'], shape, untouched),
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [slots, kvHeads, width], order),
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [slots, kvHeads], new Int32Array(slots * kvHeads)),
    };
    const row = (slot: number, head: number, token: number) =>
      (order[(slot * kvHeads + head) * width + Math.floor(token / blockTokens)] ?? NaN) * blockTokens +
      (token % blockTokens);
    return { blocks, capacity: blockTokens * width, row };
  }

  it('writes every new token once, rounded to the cache, and counts it', async () => {
    const random = new Random(1);
    for (let round = 0; round < 20; round++) {
      const [kvHeads, dim] = [random.integer(1, 3), random.pick([1, 7, 64, 80])];
      const [rowDType, cacheDType] = [random.pick(floats), random.pick(floats)];
      const { blocks, row } = emptyCache(random, cacheDType, 3, kvHeads, dim);
      const axes = ['token', 'kvHead', 'dim'] as const;
      const expected = new Map<number, readonly [Float64Array, Float64Array]>();
      const counts = [0, 0, 0];
      // Three steps, each with some rows for slots 2 and 0.
      for (let step = 0; step < 3; step++) {
        const rows = [random.integer(0, 4), random.integer(0, 4)] as const;
        const tokens = rows[0] + rows[1];
        const keys = random.elements(rowDType, tokens * kvHeads * dim);
        const values = random.elements(rowDType, tokens * kvHeads * dim);
        using keyTensor = device.tensor(rowDType, axes, [tokens, kvHeads, dim], keys);
        using valueTensor = device.tensor(rowDType, axes, [tokens, kvHeads, dim], values);
        using slots = device.tensor('i32', ['batch'], [2], Int32Array.of(2, 0));
        using queryStart = device.tensor('i32', ['boundary'], [3], Int32Array.of(0, rows[0], tokens));
        appendKv(stream, { keys: keyTensor, values: valueTensor, blocks, slots, queryStart });
        for (let token = 0; token < tokens; token++) {
          const slot = token < rows[0] ? 2 : 0;
          const place = counts[slot] ?? NaN;
          for (let head = 0; head < kvHeads; head++) {
            const first = (token * kvHeads + head) * dim;
            const stored = [keys, values].map((array) => {
              const numbers = decode(rowDType, array).subarray(first, first + dim);
              return decode(cacheDType, encode(cacheDType, numbers));
            });
            expected.set(row(slot, head, place), stored as [Float64Array, Float64Array]);
          }
          counts[slot] = place + 1;
        }
      }
      const keyNumbers = decode(cacheDType, await blocks.keys.read());
      const valueNumbers = decode(cacheDType, await blocks.values.read());
      const untouched = new Float64Array(dim).fill(NaN);
      for (let place = 0; place < keyNumbers.length / dim; place++) {
        const [key, value] = expected.get(place) ?? [untouched, untouched];
        expect(keyNumbers.subarray(place * dim, (place + 1) * dim)).toEqual(key);
        expect(valueNumbers.subarray(place * dim, (place + 1) * dim)).toEqual(value);
      }
      const wantedCounts = counts.flatMap((count) => Array<number>(kvHeads).fill(count));
      expect(Array.from(await blocks.keyCounts.read())).toEqual(wantedCounts);
      for (const tensor of Object.values(blocks)) tensor.dispose();
    }
  });

  it('turns queries and keys first, with the bits of rope and appendKv one behind the other', async () => {
    const random = new Random(8);
    const [kvHeads, group, entries] = [2, 4, 5];
    const heads = kvHeads * (group + 2);
    for (const dtype of floats) {
      for (const dim of [16, 64, 128]) {
        for (const rows of [[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [3, 0, 0, 2, 0], [9, 1, 0, 2, 4]]) {
          const tokens = rows.reduce((sum, count) => sum + count, 0);
          const ends = rows.map((_, entry) => rows.slice(0, entry + 1).reduce((sum, count) => sum + count, 0));
          const data = random.elements(dtype, tokens * heads * dim);
          const pairs = dim === 16 ? 5 : dim / 2;
          using slots = device.tensor('i32', ['batch'], [entries], Int32Array.of(4, 0, 2, 1, 5));
          using queryStart = device.tensor('i32', ['boundary'], [entries + 1], Int32Array.of(0, ...ends));
          using positions = device.tensor('i32', ['token'], [tokens], Int32Array.from({ length: tokens }, () => random.integer(0, 2 ** 20)));
          const frequencies = Float32Array.from({ length: pairs }, (_, pair) => 500_000 ** (-pair / pairs));
          using inverseFrequencies = device.tensor('f32', ['pair'], [pairs], frequencies);
          const turn = {
            positions,
            inverseFrequencies,
            convention: random.pick(['halfSplit', 'interleaved'] as const),
            attentionScale: random.pick([1, 1.25]),
          };
          const results = [];
          const seed = random.integer(0, 1000);
          for (const together of [false, true]) {
            const { blocks } = emptyCache(new Random(seed), dtype, 6, kvHeads, dim);
            using packed = device.tensor(dtype, ['token', 'feature'], [tokens, heads * dim], data);
            const columns = <Head extends string>(axis: Head, first: number, count: number) =>
              packed.slice('feature', first * dim, (first + count) * dim).view(['token', axis, 'dim'], [tokens, count, dim]);
            const query = columns('queryHead', 0, kvHeads * group);
            const keys = columns('kvHead', kvHeads * group, kvHeads);
            const values = columns('kvHead', kvHeads * (group + 1), kvHeads);
            if (together) {
              appendKv(stream, { keys, values, blocks, slots, queryStart, rope: { query, ...turn } });
            } else {
              const turning = columns('head', 0, kvHeads * (group + 1));
              rope(stream, { input: turning, output: turning, ...turn });
              appendKv(stream, { keys, values, blocks, slots, queryStart });
            }
            results.push(await packed.read(), await blocks.keys.read(), await blocks.values.read(), await blocks.keyCounts.read());
            for (const tensor of Object.values(blocks)) tensor.dispose();
          }
          expect(results.slice(4)).toEqual(results.slice(0, 4));
        }
      }
    }
  });

  it('refuses a turn that does not fit the rows', () => {
    const { blocks } = emptyCache(new Random(9), 'f32', 1, 1, 8);
    using keys = device.tensor('f32', ['token', 'kvHead', 'dim'], [1, 1, 8]);
    using values = device.tensor('f32', ['token', 'kvHead', 'dim'], [1, 1, 8]);
    using query = device.tensor('f32', ['token', 'queryHead', 'dim'], [1, 2, 8]);
    using halves = device.tensor('f16', ['token', 'queryHead', 'dim'], [1, 2, 8]);
    using slots = device.tensor('i32', ['batch'], [1], Int32Array.of(0));
    using queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 1));
    using positions = device.tensor('i32', ['token'], [1]);
    using two = device.tensor('i32', ['token'], [2]);
    using inverseFrequencies = device.tensor('f32', ['pair'], [4]);
    using five = device.tensor('f32', ['pair'], [5]);
    const good = { query, positions, inverseFrequencies, convention: 'halfSplit' } as const;
    const append = (rope: object) => {
      appendKv(stream, { keys, values, blocks, slots, queryStart, rope: rope as typeof good });
    };
    append(good);
    expect(() => append({ ...good, positions: two })).toThrow(ShapeError);
    expect(() => append({ ...good, inverseFrequencies: five })).toThrow(/dim \/ 2/);
    expect(() => append({ ...good, query: halves })).toThrow(DTypeError);
    expect(() => append({ ...good, query: keys })).toThrow(InvalidValueError);
    expect(() => append({ ...good, convention: 'sideways' })).toThrow(InvalidValueError);
    expect(() => append({ ...good, attentionScale: NaN })).toThrow(InvalidValueError);
    expect(() => append({ query })).toThrow(DeviceError);
    expect(() => appendKv(stream, { keys, values, blocks, slots, queryStart, rope: null as never })).toThrow(InvalidValueError);
    for (const tensor of Object.values(blocks)) tensor.dispose();
  });

  it('neither reads nor writes the slot of an entry without rows', async () => {
    const [kvHeads, dim] = [2, 8];
    const { blocks, row } = emptyCache(new Random(3), 'f32', 3, kvHeads, dim);
    // Slots 0 and 2 are of no use.
    stream.write(blocks.blockTable.slice('slot', 0, 1), new Int32Array(24).fill(-1));
    stream.write(blocks.blockTable.slice('slot', 2, 3), new Int32Array(24).fill(2 ** 30));
    const counts = Int32Array.of(2 ** 30, -5, 4, 3, -1, 7);
    stream.write(blocks.keyCounts, counts);
    using rows = device.tensor('f32', ['token', 'kvHead', 'dim'], [4, kvHeads, dim], new Float32Array(4 * 16).fill(1));
    using slots = device.tensor('i32', ['batch'], [3], Int32Array.of(0, 1, 2));
    using queryStart = device.tensor('i32', ['boundary'], [4], Int32Array.of(0, 0, 1, 1));
    const before = await blocks.keys.read(stream);
    appendKv(stream, { keys: rows, values: rows, blocks, slots, queryStart });
    for (const [head, count] of [4, 3].entries()) {
      before.fill(1, row(1, head, count) * dim, (row(1, head, count) + 1) * dim);
    }
    expect(await blocks.keys.read(stream)).toEqual(before);
    expect(await blocks.values.read(stream)).toEqual(before);
    expect(await blocks.keyCounts.read(stream)).toEqual(counts.map((count, at) => count + (at === 2 || at === 3 ? 1 : 0)));
    for (const tensor of Object.values(blocks)) tensor.dispose();
  });

  it('appends many rows of one entry among many entries without rows', async () => {
    const [entries, kvHeads, blockTokens, width] = [40, 2, 4, 12];
    const rows: number[] = Array.from({ length: entries }, (_, entry) => (entry === 3 ? 33 : entry === 7 ? 5 : 0));
    const tokens = rows.reduce((sum, count) => sum + count, 0);
    const shape = [entries * kvHeads * width, blockTokens, 1] as const;
    const numbers = Int32Array.from({ length: shape[0] }, (_, block) => block);
    const zeros = new Float32Array(shape[0] * blockTokens);
    using pool = device.tensor('f32', ['block', 'blockToken', 'dim'], shape, zeros);
    using otherPool = device.tensor('f32', ['block', 'blockToken', 'dim'], shape, zeros);
    using blockTable = device.tensor('i32', ['slot', 'kvHead', 'block'], [entries, kvHeads, width], numbers);
    using keyCounts = device.tensor('i32', ['slot', 'kvHead'], [entries, kvHeads], new Int32Array(entries * kvHeads));
    const data = Float32Array.from({ length: tokens * kvHeads }, (_, i) => i + 1);
    using keys = device.tensor('f32', ['token', 'kvHead', 'dim'], [tokens, kvHeads, 1], data);
    using slots = device.tensor('i32', ['batch'], [entries], Int32Array.from(rows.keys()));
    const ends = rows.map((_, entry) => rows.slice(0, entry + 1).reduce((sum, count) => sum + count, 0));
    using queryStart = device.tensor('i32', ['boundary'], [entries + 1], Int32Array.of(0, ...ends));
    const blocks = { keys: pool, values: otherPool, blockTable, keyCounts };
    appendKv(stream, { keys, values: keys, blocks, slots, queryStart });
    const wanted = zeros.slice();
    for (let token = 0; token < tokens; token++) {
      const entry = token < 33 ? 3 : 7;
      for (let head = 0; head < kvHeads; head++) {
        const place = (entry * kvHeads + head) * width * blockTokens + (token % 33);
        wanted[place] = token * kvHeads + head + 1;
      }
    }
    expect(await pool.read()).toEqual(wanted);
    expect(await otherPool.read()).toEqual(wanted);
    expect(Array.from(await keyCounts.read())).toEqual(rows.flatMap((count) => [count, count]));
  });

  it('refuses a slot that two entries with rows name, before it writes', async () => {
    const [kvHeads, dim] = [2, 8];
    const { blocks, capacity, row } = emptyCache(new Random(4), 'f32', 3, kvHeads, dim);
    // Either entry fits, and both together do not.
    const tokens = 2 * (capacity - 1);
    using rows = device.tensor('f32', ['token', 'kvHead', 'dim'], [tokens, kvHeads, dim], new Float32Array(tokens * 16).fill(1));
    using slots = device.tensor('i32', ['batch'], [3], Int32Array.of(1, 1, 1));
    using twice = device.tensor('i32', ['boundary'], [4], Int32Array.of(0, tokens / 2, tokens / 2, tokens));
    using once = device.tensor('i32', ['boundary'], [4], Int32Array.of(0, 0, 1, 1));
    const before = await blocks.keys.read();
    const other = device.createStream();
    appendKv(other, { keys: rows, values: rows, blocks, slots, queryStart: twice });
    const failure: unknown = await other.synchronize().catch((error: unknown) => error);
    expect(failure).toBeInstanceOf(InvalidValueError);
    expect((failure as Error).message).toMatch(/slot 1 .*twice/);
    expect(await blocks.keys.read(stream)).toEqual(before);
    expect(await blocks.values.read(stream)).toEqual(before);
    expect(await blocks.keyCounts.read(stream)).toEqual(new Int32Array(3 * kvHeads));
    appendKv(stream, { keys: rows, values: rows, blocks, slots, queryStart: once });
    for (const head of [0, 1]) before.fill(1, row(1, head, 0) * dim, (row(1, head, 0) + 1) * dim);
    expect(await blocks.keys.read(stream)).toEqual(before);
    for (const tensor of Object.values(blocks)) tensor.dispose();
    other.dispose();
  });

  it('refuses bad input with a typed error, and rows that do not fit before it writes', async () => {
    const { blocks, capacity } = emptyCache(new Random(2), 'f16', 1, 2, 8);
    const axes = ['token', 'kvHead', 'dim'] as const;
    const tokens = capacity + 1;
    const rows = device.tensor('f32', axes, [tokens, 2, 8], new Float32Array(tokens * 16).fill(1));
    const slots = device.tensor('i32', ['batch'], [1], Int32Array.of(0));
    const queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, tokens));
    const good = { keys: rows, values: rows, blocks, slots, queryStart };
    expect(() => {
      appendKv(stream, { ...good, values: rows.slice('token', 0, 1) });
    }).toThrow(ShapeError);
    expect(() => {
      appendKv(stream, { ...good, values: device.tensor('f16', axes, rows.shape) });
    }).toThrow(DTypeError);
    expect(() => {
      appendKv(stream, { ...good, keys: rows.slice('dim', 0, 7), values: rows.slice('dim', 0, 7) });
    }).toThrow(ShapeError);

    const before = await blocks.keys.read();
    const other = device.createStream();
    appendKv(other, good);
    await expect(other.synchronize()).rejects.toThrow(InvalidValueError);
    expect(await blocks.keys.read(stream)).toEqual(before);
    expect(Array.from(await blocks.keyCounts.read(stream))).toEqual([0, 0]);
  });
});
