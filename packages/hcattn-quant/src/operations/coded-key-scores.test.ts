import { CapabilityError, type Device, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockTokens } from '../quantized-blocks.js';
import { type CodedSizes, randomCodedCache } from '../testing/random-coded-cache.js';
import { spoil, spoiltBatches } from '../testing/spoilt-batches.js';
import { codedKeyScores } from './coded-key-scores.js';
import { decodeKeys } from './decode-keys.js';
import { encodeKeys } from './encode-keys.js';

const axes = ['token', 'queryHead', 'dim'] as const;
const dtypes = ['f32', 'f16', 'bf16'] as const;

type Cache = Awaited<ReturnType<typeof randomCodedCache>>;

const small: CodedSizes = {
  ...{ kvHeads: 2, group: 3, headDim: 64, groups: 32, centroids: 64 },
  rows: [1, 2],
  blocks: [
    [3, 9],
    [1, 0],
  ],
};

/** Of the ranges of scores that are asked for. */
const rangeParts = { f32: 1, f16: 5, bf16: 0 } as const;

/** Scores `[token][queryHead][key]`, with NaN where nothing was written, and the queries as stored. */
async function score(device: Device, random: Random, sizes: CodedSizes, cache: Cache, dtype: FloatDType, query?: Float64Array) {
  const { kvHeads, group, headDim } = sizes;
  const tokens = cache.starts.at(-1) ?? NaN;
  const heads = kvHeads * group;
  const keys = cache.width * blockTokens;
  const elements = query === undefined ? random.elements(dtype, tokens * heads * headDim) : encode(dtype, query);
  // One row, one head and some keys more than are used, so that strides are not those of the shape.
  const whole = [tokens + 1, heads + 1, keys + 20] as const;
  const room = device.tensor('f32', ['token', 'queryHead', 'key'], whole, new Float32Array(whole[0] * whole[1] * whole[2]).fill(NaN));
  const scores = room.slice('token', 0, tokens).slice('queryHead', 0, heads);
  const parts = rangeParts[dtype];
  const unwritten = new Float32Array(tokens * heads * parts * 2).fill(7);
  const ranges = parts === 0 ? undefined : device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [tokens, heads, parts, 2], unwritten);
  const stream = device.createStream();
  const scale = headDim ** -0.5;
  codedKeyScores(stream, { ...cache.arguments, query: device.tensor(dtype, axes, [tokens, heads, headDim], elements), scores, ranges, scale });
  await stream.synchronize();
  const all = await room.read();
  const bounds = await ranges?.read();
  return {
    queries: decode(dtype, elements),
    scale,
    /** Those of one row and head, with what lies behind them. */
    row: (token: number, head: number) => all.subarray((token * whole[1] + head) * whole[2], (token * whole[1] + head + 1) * whole[2]),
    all,
    /** The least and the largest score of one row and head, if ranges were asked for. */
    range(token: number, head: number): readonly number[] | undefined {
      const own = bounds?.subarray((token * heads + head) * parts * 2, (token * heads + head + 1) * parts * 2);
      return own && [Math.min(...own.filter((_, i) => i % 2 === 0)), Math.max(...own.filter((_, i) => i % 2 === 1))];
    },
  };
}

async function checkAgainstOracle(device: Device, random: Random, sizes: CodedSizes, dtype: FloatDType) {
  const { kvHeads, group, headDim } = sizes;
  const cache = await randomCodedCache(device.createStream(), random, sizes);
  const result = await score(device, random, sizes, cache, dtype);
  const heads = kvHeads * group;
  const half = device.kind === 'cuda' && dtype !== 'f32' ? unitRoundoff.f16 : 0;
  let wrong = 0;
  sizes.rows.forEach((rows, entry) => {
    for (let index = 0; index < rows * heads; index++) {
      const token = (cache.starts[entry] ?? NaN) + Math.floor(index / heads);
      const head = index % heads;
      const query = result.queries.subarray((token * heads + head) * headDim, (token * heads + head + 1) * headDim);
      const largest = Math.max(...query.map(Math.abs));
      const row = result.row(token, head);
      const kvHead = Math.floor(head / group);
      const blocks = sizes.blocks[entry]?.[kvHead] ?? NaN;
      for (let block = 0; block < blocks; block++) {
        const keys = cache.keys(entry, kvHead, block);
        for (let i = 0; i < blockTokens; i++) {
          let [exact, magnitude, length] = [0, 0, 0];
          for (let dim = 0; dim < headDim; dim++) {
            const [q, k] = [query[dim] ?? NaN, keys[i * headDim + dim] ?? NaN];
            exact += q * k;
            magnitude += Math.abs(q * k);
            length += Math.abs(k);
          }
          // Each product and sum is rounded once in f32, as are the channel's scale and the score's. Queries in f16 are
          // rounded, of their largest dim those below f16's range.
          const error = ((headDim + 4) * unitRoundoff.f32 + half) * magnitude + half * 2 ** -14 * largest * length;
          const given = (row[block * blockTokens + i] ?? NaN) / result.scale;
          if (!(Math.abs(given - exact) <= error * 1.001)) wrong++;
        }
      }
      if (!row.subarray(blocks * blockTokens).every(Number.isNaN)) wrong++;
      const own = row.subarray(0, blocks * blockTokens);
      const range = result.range(token, head) ?? [Math.min(...own), Math.max(...own)];
      if (range[0] !== Math.min(...own) || range[1] !== Math.max(...own)) wrong++;
    }
  });
  expect(wrong).toBe(0);
}

describeOnDevices('codedKeyScores', ({ open }) => {
  it.each<Partial<CodedSizes>>([
    { headDim: 128, groups: 64, centroids: 8192 },
    { headDim: 128, groups: 32, centroids: 8192, scaled: true },
    { headDim: 64, groups: 32, centroids: 4096, scaled: true },
    { headDim: 64, groups: 16, centroids: 8192 },
    { headDim: 64, groups: 16, centroids: 5000 },
    { headDim: 128, groups: 64, centroids: 8192, codeBits: 16 },
    { headDim: 128, groups: 64, centroids: 256 },
    { headDim: 128, groups: 32, centroids: 64, separate: true },
    { headDim: 64, groups: 8, centroids: 100 },
    { headDim: 96, groups: 24, centroids: 31, separate: true, scaled: true },
    { headDim: 80, groups: 20, centroids: 77 },
    { headDim: 14, groups: 7, centroids: 5 },
    { headDim: 15, groups: 5, centroids: 9 },
    { headDim: 9, groups: 9, centroids: 2 },
    { headDim: 512, groups: 64, centroids: 17 },
  ])('matches the float64 oracle over random rows, groups of heads and lengths (%o)', async (sizes) => {
    const device = open();
    const random = new Random((sizes.headDim ?? 0) + (sizes.groups ?? 0));
    for (const dtype of dtypes) {
      const kvHeads = random.integer(1, 2);
      const rows = Array.from({ length: random.integer(1, 2) }, () => random.pick([0, 1, 1, 3]));
      const blocks = rows.map(() => Array.from({ length: kvHeads }, () => random.integer(0, 2)));
      await checkAgainstOracle(device, random, { ...small, ...sizes, kvHeads, rows, blocks, group: random.integer(1, 9) }, dtype);
    }
  });

  it('matches it over more blocks than a task has', async () => {
    const device = open();
    const random = new Random(2);
    await checkAgainstOracle(device, random, { ...small, rows: [1], blocks: [[40, 17]], group: 4, headDim: 128, groups: 64 }, 'f16');
  });

  it('gives integers what decoded keys give, exactly', async () => {
    const device = open();
    const random = new Random(3);
    for (const sizes of [small, { ...small, headDim: 128, groups: 32, centroids: 500 }, { ...small, headDim: 80, groups: 20 }]) {
      const { headDim, group, kvHeads } = sizes;
      const stream = device.createStream();
      const integers = encode('f16', Float64Array.from({ length: (kvHeads * sizes.centroids * headDim) / sizes.groups }, () => random.integer(-9, 9)));
      const cache = await randomCodedCache(stream, random, sizes, integers);
      const query = Float64Array.from({ length: 3 * kvHeads * group * headDim }, () => random.integer(-9, 9));
      const result = await score(device, random, sizes, cache, 'f16', query);
      const table = await cache.arguments.blockTable.read();
      // The first block of the last slot, which is the first entry's.
      const first = table[kvHeads * cache.width] ?? NaN;
      const keys = device.tensor('f32', ['block', 'blockToken', 'dim'], [1, blockTokens, headDim]);
      decodeKeys(stream, { ...cache.arguments, keys, from: [first], to: [0], kvHeads: [0] });
      const decoded = await keys.read();
      for (let token = 0; token < blockTokens; token++) {
        let sum = 0;
        for (let dim = 0; dim < headDim; dim++) sum += (query[dim] ?? NaN) * (decoded[token * headDim + dim] ?? NaN);
        expect(result.row(0, 0)[token]).toBe(Math.fround(sum * Math.fround(result.scale)));
      }
    }
  });

  it('gives the same bits on one thread and on three', async () => {
    const results = [];
    for (const threads of [1, 3]) {
      const device = open(threads);
      const sizes = { ...small, blocks: [[40, 3], [1, 0]] };
      const cache = await randomCodedCache(device.createStream(), new Random(3), sizes);
      results.push((await score(device, new Random(4), sizes, cache, 'f16')).all);
    }
    expect(results[1]).toEqual(results[0]);
  });

  it('shows a NaN of a query in its own row and head', async () => {
    const device = open();
    for (const headDim of [64, 80]) {
      const sizes = { ...small, headDim, groups: headDim / 2 };
      const cache = await randomCodedCache(device.createStream(), new Random(5), sizes);
      const query = Float64Array.from({ length: 3 * 6 * headDim }, (_, index) => Math.sin(index));
      const sound = await score(device, new Random(6), sizes, cache, 'f16', query);
      query[4 * headDim + 7] = NaN;
      const spoilt = await score(device, new Random(6), sizes, cache, 'f16', query);
      expect(spoilt.row(0, 4).every(Number.isNaN)).toBe(true);
      for (const head of [0, 1, 2, 3, 5]) expect(spoilt.row(0, head)).toEqual(sound.row(0, head));
      expect(spoilt.row(1, 4)).toEqual(sound.row(1, 4));
    }
  });

  it('shows a key that is not finite in the scores of its token, and in no other', async () => {
    const device = open();
    const odd = [5, 31, 32, 63];
    for (const [dtype, headDim] of [['f16', 64], ['f16', 80], ['f32', 64]] as const) {
      const sizes = { ...small, headDim, groups: headDim / 2 };
      const stream = device.createStream();
      const cache = await randomCodedCache(stream, new Random(13), sizes);
      const [kvHead, place] = [1, 2]; // of the first entry, which has the last slot
      const block = (await cache.arguments.blockTable.read())[(sizes.kvHeads + kvHead) * cache.width + place] ?? NaN;
      const numbers = Float32Array.from({ length: blockTokens * headDim }, (_, index) => Math.sin(index));
      odd.forEach((token, index) => (numbers[token * headDim + 7 * index] = [NaN, Infinity, -Infinity, NaN][index] ?? 0));
      const keys = device.tensor('f32', ['block', 'blockToken', 'dim'], [1, blockTokens, headDim], numbers);
      encodeKeys(stream, { ...cache.arguments, keys, from: [0], to: [block], kvHeads: [kvHead] });
      await stream.synchronize();
      const result = await score(device, new Random(14), sizes, cache, dtype);
      for (let head = 0; head < sizes.kvHeads * sizes.group; head++) {
        const length = (sizes.blocks[0]?.[Math.floor(head / sizes.group)] ?? NaN) * blockTokens;
        const scores = Array.from(result.row(0, head).subarray(0, length));
        const lost = scores.flatMap((x, token) => (Number.isNaN(x) ? [token] : []));
        expect(lost).toEqual(head < sizes.group ? [] : odd.map((token) => place * blockTokens + token));
        expect(result.range(0, head)?.[1]).toBe(Math.max(...scores));
      }
    }
  });

  it('keeps what queries of any size give', async () => {
    const device = open();
    for (const [dtype, size] of [['bf16', 2 ** 100], ['bf16', 2 ** -100], ['f16', 2 ** -14], ['f32', 2 ** 100]] as const) {
      const cache = await randomCodedCache(device.createStream(), new Random(7), small);
      const query = Float64Array.from({ length: 3 * 6 * 64 }, (_, index) => Math.round(8 * Math.sin(index)));
      const result = await score(device, new Random(8), small, cache, dtype, query.map((x) => x * size));
      const plain = await score(device, new Random(8), small, cache, dtype, query);
      expect(result.row(0, 0).subarray(0, 192)).toEqual(plain.row(0, 0).subarray(0, 192).map((x) => x * size));
    }
  });

  it('reads no slot of an entry without rows, and writes nothing without blocks', async () => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const sizes = { ...small, rows: [1, 0], blocks: [[0, 0], [1, 1]] };
      const cache = await randomCodedCache(device.createStream(), new Random(9), sizes);
      device.createStream().write(cache.arguments.blockTable, new Int32Array(4).fill(-5));
      expect((await score(device, new Random(10), sizes, cache, dtype)).all.every(Number.isNaN)).toBe(true);
    }
  });

  it.each(spoiltBatches)('rejects the wait for a batch that %s', async (_, tensor, number) => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const cache = await randomCodedCache(device.createStream(), new Random(11), small);
      await spoil(device.createStream(), cache.arguments[tensor], number);
      await expect(score(device, new Random(12), small, cache, dtype)).rejects.toThrow(InvalidValueError);
    }
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const stream = device.createStream();
    const cache = await randomCodedCache(stream, new Random(13), small);
    const rows = (queryHeads: number, headDim = 64) => device.tensor('f16', axes, [3, queryHeads, headDim]);
    const room = (queryHeads: number, keys: number) => device.tensor('f32', ['token', 'queryHead', 'key'], [3, queryHeads, keys]);
    const good = { ...cache.arguments, query: rows(6), scores: room(6, 9 * 64), scale: 0.125 };
    expectRefusals(codedKeyScores, stream, good, [
      [{ codeBits: 17 }, CapabilityError],
      [{ codeBits: 7 }, ShapeError],
      [{ query: rows(5), scores: room(5, 576) }, ShapeError],
      [{ query: rows(6, 32) }, ShapeError],
      [{ scores: room(6, 575) }, ShapeError],
      [{ scores: room(5, 576) }, ShapeError],
      [{ scale: NaN }, InvalidValueError],
      [{ codedKeys: good.query }, DTypeError],
      [{ ranges: device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [3, 6, 0, 2]) }, InvalidValueError],
      [{ ranges: device.tensor('f32', ['token', 'queryHead', 'part', 'bound'], [3, 5, 4, 2]) }, ShapeError],
      [{ channelScale: device.tensor('f32', ['kvHead', 'dim'], [2, 60]) }, ShapeError],
    ]);
  });
});
