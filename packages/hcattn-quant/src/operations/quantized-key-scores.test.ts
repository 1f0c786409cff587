import { CapabilityError, type Device, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockTokens, codeBits, type CodeBits } from '../quantized-blocks.js';
import { rotated, rotationRun } from '../testing/quantized-oracle.js';
import { type QuantizedSizes, randomQuantizedCache } from '../testing/random-quantized-cache.js';
import { spoil, spoiltBatches } from '../testing/spoilt-batches.js';
import { quantizedKeyScores } from './quantized-key-scores.js';

const axes = ['token', 'queryHead', 'dim'] as const;
const dtypes = ['f32', 'f16', 'bf16'] as const;

type Sizes = QuantizedSizes<CodeBits>;
type Cache = ReturnType<typeof randomQuantizedCache<CodeBits>>;

const small: Sizes = {
  ...{ kvHeads: 2, group: 3, headDim: 64, keyBits: 4, valueBits: 8 },
  rows: [1, 2],
  blocks: [
    [3, 5],
    [1, 0],
  ],
};

const keyArguments = ({ quantizedKeys, keyBits, blockTable, keyCounts, slots, queryStart }: Cache['arguments']) => ({
  ...{ quantizedKeys, keyBits, blockTable, keyCounts, slots, queryStart },
});

interface Settings {
  readonly dtype?: FloatDType;
  readonly isRotated?: boolean;
  readonly query?: Float64Array;
}

/** Scores `[token][queryHead][key]`, with NaN where nothing was written, and the queries as stored. */
async function score(device: Device, random: Random, sizes: Sizes, cache: Cache, settings: Settings = {}) {
  const { dtype = 'f16', isRotated, query } = settings;
  const { kvHeads, group, headDim } = sizes;
  const tokens = cache.starts.at(-1) ?? NaN;
  const heads = kvHeads * group;
  const keys = cache.arguments.blockTable.shape[2] * blockTokens;
  const elements = query === undefined ? random.elements(dtype, tokens * heads * headDim) : encode(dtype, query);
  // One row, one head and some keys more than are used, so that strides are not those of the shape.
  const whole = [tokens + 1, heads + 1, keys + 20] as const;
  const room = device.tensor('f32', ['token', 'queryHead', 'key'], whole, new Float32Array(whole[0] * whole[1] * whole[2]).fill(NaN));
  const scores = room.slice('token', 0, tokens).slice('queryHead', 0, heads);
  const stream = device.createStream();
  const scale = headDim ** -0.5;
  const rows = device.tensor(dtype, axes, [tokens, heads, headDim], elements);
  quantizedKeyScores(stream, { ...keyArguments(cache.arguments), query: rows, scores, scale, rotated: isRotated });
  await stream.synchronize();
  const all = await room.read();
  return {
    queries: decode(dtype, elements),
    scale,
    /** Those of one row and head, with what lies behind them. */
    row: (token: number, head: number) => all.subarray((token * whole[1] + head) * whole[2], (token * whole[1] + head + 1) * whole[2]),
    all,
  };
}

async function checkAgainstOracle(device: Device, random: Random, sizes: Sizes, dtype: FloatDType, isRotated: boolean) {
  const { kvHeads, group, headDim } = sizes;
  const cache = randomQuantizedCache(device, random, sizes);
  const result = await score(device, random, sizes, cache, { dtype, isRotated });
  const heads = kvHeads * group;
  // Queries become multiples of their largest dim over 127 * 256 + 127.
  const digits = device.kind === 'cuda' && dtype !== 'f32' ? 0.5 / 32639 : 0;
  let wrong = 0;
  sizes.rows.forEach((rows, entry) => {
    for (let index = 0; index < rows * heads; index++) {
      const token = (cache.starts[entry] ?? NaN) + Math.floor(index / heads);
      const head = index % heads;
      const given = result.queries.slice((token * heads + head) * headDim, (token * heads + head + 1) * headDim);
      const query = isRotated ? rotated(given) : given;
      // A rotation rounds each dim once a stage, relative to the row's length, as do its factor and the scale.
      const rotation = isRotated ? (Math.log2(rotationRun(headDim)) + 3) * unitRoundoff.f32 * Math.hypot(...given) : 0;
      const largest = Math.max(...query.map(Math.abs)) + rotation;
      const kvHead = Math.floor(head / group);
      const keys = (sizes.blocks[entry]?.[kvHead] ?? NaN) * blockTokens;
      const row = result.row(token, head);
      for (let key = 0; key < keys; key++) {
        let [exact, magnitude, length] = [0, 0, 0];
        cache.key(entry, kvHead, key).forEach((k, dim) => {
          const q = query[dim] ?? NaN;
          exact += q * k;
          magnitude += Math.abs(q * k);
          length += Math.abs(k);
        });
        // Each product and sum is rounded once in f32, as are the step's product and the score's scale.
        const error = (headDim + 6) * unitRoundoff.f32 * magnitude + (rotation + digits * largest) * length;
        if (!(Math.abs((row[key] ?? NaN) / result.scale - exact) <= error * 1.001)) wrong++;
      }
      if (!row.subarray(keys).every(Number.isNaN)) wrong++;
    }
  });
  expect(wrong).toBe(0);
}

describeOnDevices('quantizedKeyScores', ({ open }) => {
  it.each(codeBits)('matches the float64 oracle over random heads, rows, groups of heads and lengths, rotated and plain (%i bits)', async (keyBits) => {
    const device = open();
    const random = new Random(keyBits);
    for (const headDim of [64, 128, random.pick([20, 80, 96]), random.pick([7, 160, 512])]) {
      for (const dtype of dtypes) {
        const kvHeads = random.integer(1, 2);
        const rows = Array.from({ length: random.integer(1, 2) }, () => random.pick([0, 1, 1, 3]));
        const blocks = rows.map(() => Array.from({ length: kvHeads }, () => random.integer(0, 2)));
        const sizes = { ...small, headDim, keyBits, kvHeads, rows, blocks, group: random.integer(1, 9) };
        await checkAgainstOracle(device, random, sizes, dtype, random.next() < 0.7);
      }
    }
  });

  it('matches it over more blocks than a task has', async () => {
    await checkAgainstOracle(open(), new Random(2), { ...small, rows: [1], blocks: [[40, 17]], keyBits: 3 }, 'f16', true);
  });

  it('gives a query that is one dim that dim of plain keys', async () => {
    const device = open();
    for (const keyBits of codeBits) {
      for (const dtype of dtypes) {
        const sizes = { ...small, keyBits };
        // Digits of a dim are multiplied by their step, by that of the codes and by a unit: three roundings.
        const most = device.kind === 'cuda' && dtype !== 'f32' ? 3.01 * unitRoundoff.f32 : 0;
        const cache = randomQuantizedCache(device, new Random(3), sizes);
        const query = new Float64Array(3 * 6 * 64);
        for (let head = 0; head < 6; head++) query[head * 64 + 11 * head] = 8;
        const result = await score(device, new Random(4), sizes, cache, { dtype, query, isRotated: false });
        for (let head = 0; head < 6; head++) {
          const kvHead = Math.floor(head / 3);
          const keys = (small.blocks[0]?.[kvHead] ?? NaN) * blockTokens;
          const errors = Array.from({ length: keys }, (_, key) => {
            const wanted = cache.key(0, kvHead, key)[11 * head] ?? NaN;
            return Math.abs((result.row(0, head)[key] ?? NaN) - wanted) - most * Math.abs(wanted);
          });
          expect(Math.max(0, ...errors)).toBe(0);
        }
      }
    }
  });

  it('gives the same bits on one thread and on three', async () => {
    const results = [];
    for (const threads of [1, 3]) {
      const device = open(threads);
      const sizes = { ...small, blocks: [[40, 3], [1, 0]] };
      const cache = randomQuantizedCache(device, new Random(3), sizes);
      results.push((await score(device, new Random(4), sizes, cache)).all);
    }
    expect(results[1]).toEqual(results[0]);
  });

  it.each(codeBits)('shows a NaN of a query in its own row and head, and of a key in its own scores (%i bits)', async (keyBits) => {
    const device = open();
    for (const headDim of [64, 80]) {
      const sizes = { ...small, headDim, keyBits };
      const cache = randomQuantizedCache(device, new Random(5), sizes);
      const query = Float64Array.from({ length: 3 * 6 * headDim }, (_, index) => Math.sin(index));
      const sound = await score(device, new Random(6), sizes, cache, { query });
      query[4 * headDim + 7] = NaN;
      const bytes = cache.bytes.keys.slice();
      bytes[cache.scaleAt('keys', 0, 0, 70)] = 0xff;
      const stream = device.createStream();
      stream.write(cache.arguments.quantizedKeys, bytes);
      await stream.synchronize();
      const spoilt = await score(device, new Random(6), sizes, cache, { query });
      expect(spoilt.row(0, 4).every(Number.isNaN)).toBe(true);
      for (const head of [0, 1, 2, 3, 5]) {
        const wanted = sound.row(0, head).slice();
        if (head < 3) wanted[70] = NaN;
        expect(spoilt.row(0, head)).toEqual(wanted);
      }
      expect(spoilt.row(1, 4)).toEqual(sound.row(1, 4));
    }
  });

  it('keeps what queries of any size give', async () => {
    const device = open();
    for (const [dtype, size] of [['bf16', 2 ** 100], ['bf16', 2 ** -60], ['f16', 2 ** -10], ['f32', 2 ** 100]] as const) {
      const cache = randomQuantizedCache(device, new Random(7), small);
      const query = Float64Array.from({ length: 3 * 6 * 64 }, (_, index) => Math.round(8 * Math.sin(index)));
      const result = await score(device, new Random(8), small, cache, { dtype, query: query.map((x) => x * size) });
      const plain = await score(device, new Random(8), small, cache, { dtype, query });
      expect(result.row(0, 0).subarray(0, 192)).toEqual(plain.row(0, 0).subarray(0, 192).map((x) => x * size));
    }
  });

  it('reads no slot of an entry without rows, and writes nothing without blocks', async () => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const sizes = { ...small, rows: [1, 0], blocks: [[0, 0], [1, 1]] };
      const cache = randomQuantizedCache(device, new Random(9), sizes);
      const stream = device.createStream();
      stream.write(cache.arguments.blockTable, new Int32Array(4).fill(-5));
      await stream.synchronize();
      expect((await score(device, new Random(10), sizes, cache, { dtype })).all.every(Number.isNaN)).toBe(true);
    }
  });

  it.each(spoiltBatches)('rejects the wait for a batch that %s', async (_, tensor, number) => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const cache = randomQuantizedCache(device, new Random(11), small);
      await spoil(device.createStream(), cache.arguments[tensor], number);
      await expect(score(device, new Random(12), small, cache, { dtype })).rejects.toThrow(InvalidValueError);
    }
  });

  it('refuses bad input with a typed error', () => {
    const device = open();
    const stream = device.createStream();
    const cache = randomQuantizedCache(device, new Random(13), small);
    const rows = (queryHeads: number, headDim = 64) => device.tensor('f16', axes, [3, queryHeads, headDim]);
    const room = (queryHeads: number, keys: number) => device.tensor('f32', ['token', 'queryHead', 'key'], [3, queryHeads, keys]);
    const good = { ...keyArguments(cache.arguments), query: rows(6), scores: room(6, 5 * 64), scale: 0.125 };
    expectRefusals(quantizedKeyScores, stream, good, [
      [{ keyBits: 5 }, CapabilityError],
      [{ keyBits: 3 }, ShapeError],
      [{ rotated: 1 }, InvalidValueError],
      [{ query: rows(5), scores: room(5, 320) }, ShapeError],
      [{ query: rows(6, 32) }, ShapeError],
      [{ scores: room(6, 319) }, ShapeError],
      [{ scores: room(5, 320) }, ShapeError],
      [{ scale: NaN }, InvalidValueError],
      [{ quantizedKeys: good.query }, DTypeError],
    ]);
  });
});
