import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import type { Device, FloatDType, Stream } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, Random, randomCache, unitRoundoff } from '@kv/sparse-core/testing';
import type { AttentionSizes, RandomCache } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { logOf, smallestNormal, stepOfSmall } from '../testing/small-scores.js';
import { groupReductions, observationScores, scoreDomains } from './observation-scores.js';
import type { GroupReduction, ScoreDomain } from './observation-scores.js';

const axes = ['token', 'queryHead', 'dim'] as const;

interface Problem {
  readonly sizes: AttentionSizes;
  readonly cache: RandomCache;
  readonly queryDType: FloatDType;
  /** `[token, queryHead, dim]`, stored elements. */
  readonly queries: Float32Array | Uint16Array;
  readonly scale: number;
  readonly domain: ScoreDomain;
  readonly groupReduction: GroupReduction;
}

function randomProblem(device: Device, random: Random, given: Partial<AttentionSizes> = {}): Problem {
  const kvHeads = random.integer(1, 3);
  const rows = Array.from({ length: random.integer(1, 3) }, () => random.pick([0, 1, 2, 5, 16, 32, 33]));
  const sizes: AttentionSizes = {
    rows,
    keyCounts: rows.map((n) =>
      Array.from({ length: kvHeads }, () => Math.max(0, n + random.pick([-3, 0, 1, 40, 130, 450]))),
    ),
    kvHeads,
    group: random.integer(1, 4),
    dim: random.pick([1, 7, 24, 64, 80, 128]),
    blockTokens: random.pick([1, 16, 50, 64]),
    cacheDType: random.pick(['f32', 'f16', 'bf16']),
    ...given,
  };
  const queryDType = random.pick(['f32', 'f16', 'bf16'] as const);
  const tokens = sizes.rows.reduce((sum, n) => sum + n, 0);
  return {
    sizes,
    cache: randomCache(device, random, sizes),
    queryDType,
    queries: random.elements(queryDType, tokens * sizes.kvHeads * sizes.group * sizes.dim),
    scale: sizes.dim ** -0.5,
    domain: random.pick(scoreDomains),
    groupReduction: random.pick(groupReductions),
  };
}

/** f32 `[batch, kvHead, token]`; what the operation does not write is NaN. */
async function run(device: Device, stream: Stream, problem: Problem): Promise<Float32Array> {
  const { sizes, cache, queryDType, queries, scale, domain, groupReduction } = problem;
  const { rows, kvHeads, group, dim, keyCounts } = sizes;
  const room = Math.max(1, ...keyCounts.flat());
  const queryHeads = kvHeads * group;
  const shape = [queries.length / (queryHeads * dim), queryHeads, dim] as const;
  using query = device.tensor(queryDType, axes, shape, queries);
  const poison = new Float32Array(rows.length * kvHeads * room).fill(NaN);
  using scores = device.tensor('f32', ['batch', 'kvHead', 'token'], [rows.length, kvHeads, room], poison);
  using slots = device.tensor('i32', ['batch'], [rows.length], cache.slots);
  using queryStart = device.tensor('i32', ['boundary'], [rows.length + 1], cache.queryStart);
  const { blocks } = cache;
  observationScores(stream, { query, scores, blocks, slots, queryStart, scale, domain, groupReduction });
  return await scores.read();
}

function dot(a: Float64Array, b: Float64Array): number {
  let sum = 0;
  for (let d = 0; d < a.length; d++) sum += (a[d] ?? NaN) * (b[d] ?? NaN);
  return sum;
}

/** ln(Σ e^x), which cannot underflow. */
function logSum(logarithms: readonly number[]): number {
  const peak = Math.max(...logarithms);
  return peak + Math.log(logarithms.reduce((sum, x) => sum + Math.exp(x - peak), 0));
}

/**
 * Logarithms of the scores of one entry and kv head in float64, written from the definition, and the largest error
 * that f32 may add to them.
 */
function oracle(problem: Problem, entry: number, kvHead: number, queries: Float64Array) {
  const { sizes, cache, scale, domain, groupReduction } = problem;
  const { kvHeads, group, dim } = sizes;
  const window = sizes.rows[entry] ?? NaN;
  const count = sizes.keyCounts[entry]?.[kvHead] ?? NaN;
  const prefix = Math.max(0, count - window);
  const keys = Array.from({ length: count }, (_, key) => cache.key(entry, kvHead, key));
  let largestProduct = 0;
  const headLogs = Array.from({ length: group }, (_, head) => {
    const rows = Array.from({ length: prefix > 0 ? window : 0 }, (_, row) => {
      const first = (((cache.queryStart[entry] ?? NaN) + row) * kvHeads * group + kvHead * group + head) * dim;
      const query = queries.subarray(first, first + dim);
      const seen = keys.slice(0, domain === 'full' ? prefix + row + 1 : prefix);
      const products = seen.map((key) => scale * dot(query, key));
      // No product of q and k, nor a partial sum of it, is larger than |q| |k|.
      const longest = Math.sqrt(Math.max(...seen.map((key) => dot(key, key))));
      largestProduct = Math.max(largestProduct, scale * Math.sqrt(dot(query, query)) * longest);
      const denominator = logSum(products);
      return products.map((product) => product - denominator);
    });
    return Array.from({ length: prefix }, (_, key) => logSum([-Infinity, ...rows.map((row) => row[key] ?? NaN)]));
  });
  const logs = Float64Array.from({ length: prefix }, (_, key) => {
    const values = headLogs.map((of) => of[key] ?? NaN);
    if (window === 0) return -Infinity;
    if (groupReduction === 'max') return Math.max(...values);
    return logSum(values) - (groupReduction === 'mean' ? Math.log(group) : 0);
  });
  // A product is a chain of `dim` additions after a scaling, and loses one rounding more when the maximum is
  // taken off it. A weight has that error from its own product and from the denominator's. The denominator adds
  // one rounding a key, the window one a query, the group one a head; exponentials and quotients at most 16.
  // Tensor cores cut off the bits that f32 additions round: twice the error of each.
  const roundings = 2 * 2 * (dim + 6) * largestProduct + 2 * (count + window + group) + 16;
  return { logs, error: roundings * unitRoundoff.f32 };
}

async function check(device: Device, stream: Stream, problem: Problem): Promise<number> {
  const { sizes, queryDType } = problem;
  const actual = await run(device, stream, problem);
  const queries = decode(queryDType, problem.queries);
  const room = Math.max(1, ...sizes.keyCounts.flat());
  let small = 0;
  sizes.rows.forEach((_, entry) => {
    for (let kvHead = 0; kvHead < sizes.kvHeads; kvHead++) {
      const row = actual.subarray((entry * sizes.kvHeads + kvHead) * room).subarray(0, room);
      const { logs, error } = oracle(problem, entry, kvHead, queries);
      logs.forEach((wanted, key) => {
        const score = row[key] ?? NaN;
        if (wanted > -Infinity) {
          if (score < 2 ** -126) small += 1;
          const step = wanted < smallestNormal ? stepOfSmall(wanted) : 0;
          expect(Math.abs(logOf(score) - wanted)).toBeLessThanOrEqual(error + step);
        } else {
          expect(score).toBe(0);
        }
      });
      expect(row.subarray(logs.length).every(Number.isNaN)).toBe(true);
    }
  });
  problem.cache.dispose();
  return small;
}

describeOnDevices('observationScores', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('sums the softmax of the last queries over every key before them', async () => {
    const random = new Random(21);
    for (let round = 0; round < 15; round++) await check(device, stream, randomProblem(device, random));
  });

  it.each(['f32', 'f16', 'bf16'] as const)('keeps scores apart that are far too small for f32, %s', async (dtype) => {
    const random = new Random(26);
    // 32 and 40 rows of four heads are one and two chunks of the tensor cores.
    for (const [dim, window] of [[24, 5], [64, 32], [128, 40]] as const) {
      for (const groupReduction of groupReductions) {
        const sizes = { rows: [window], keyCounts: [[300 + window]], kvHeads: 1, group: 4, dim, cacheDType: dtype };
        const problem = randomProblem(device, random, { ...sizes, blockTokens: 64 });
        // All queries look much the same way, so that few keys have all the weight.
        const way = decode('f32', random.elements('f32', dim, random.pick([60, 300, 2000])));
        const numbers = Float64Array.from({ length: window * 4 * dim }, (_, i) => (way[i % dim] ?? NaN) * (1 + random.next() / 8));
        const queries = encode(dtype, numbers);
        const small = await check(device, stream, { ...problem, queryDType: dtype, queries, groupReduction });
        expect(small).toBeGreaterThan(100);
      }
    }
  });

  it('does so at the sizes of models, in 16 bits', async () => {
    const random = new Random(22);
    for (const dim of [64, 128]) {
      for (const cacheDType of ['f16', 'bf16'] as const) {
        const sizes = { rows: [32], keyCounts: [[500]], kvHeads: 1, group: 4, blockTokens: 64, dim, cacheDType };
        const problem = randomProblem(device, random, sizes);
        const queries = random.elements(cacheDType, 32 * 4 * dim);
        await check(device, stream, { ...problem, queryDType: cacheDType, queries });
      }
    }
  });

  it.each(['f32', 'f16'] as const)('shows a key that is NaN in every score of its head, and in no other, %s', async (dtype) => {
    const [room, blockTokens] = [300, 64];
    const sizes = { rows: [8], keyCounts: [[room, room]], kvHeads: 2, group: 2, dim: 64, blockTokens, cacheDType: dtype };
    const random = new Random(25);
    const given = randomProblem(device, random, sizes);
    const queries = random.elements(dtype, 8 * 4 * 64);
    const problem = { ...given, queryDType: dtype, queries, groupReduction: 'mean' } as const;
    const sound = await run(device, stream, problem);
    const { keys, blockTable } = problem.cache.blocks;
    // One key of the first tile, and one further on.
    for (const token of [5, 150]) {
      const block = (await blockTable.read())[Math.floor(token / blockTokens)] ?? NaN;
      const key = keys
        .slice('block', block, block + 1)
        .slice('blockToken', token % blockTokens, (token % blockTokens) + 1);
      const before = encode(dtype, problem.cache.key(0, 0, token));
      stream.write(key, encode(dtype, new Float64Array(64).fill(NaN)));
      expect(await run(device, stream, problem)).toEqual(sound.map((score, place) => (place < room ? NaN : score)));
      stream.write(key, before);
    }
    problem.cache.dispose();
  });

  it.each(['f32', 'f16'] as const)(
    'gives an entry the same bits whatever its neighbours and the thread count, %s',
    async (dtype) => {
      const random = new Random(23);
      const keyCounts = [[900], [40], [513]];
      const sizes = { rows: [32, 7, 1], keyCounts, kvHeads: 1, group: 2, dim: 64, blockTokens: 64, cacheDType: dtype };
      const problem = {
        ...randomProblem(device, random, sizes),
        queryDType: dtype,
        queries: random.elements(dtype, 40 * sizes.group * sizes.dim),
      };
      const together = await run(device, stream, problem);
      const single = open(1);
      const aloneStream = single.createStream();
      for (const [entry, rows] of sizes.rows.entries()) {
        const first = problem.cache.queryStart[entry] ?? NaN;
        const elements = sizes.group * sizes.dim;
        const queries = problem.queries.slice(first * elements, (first + rows) * elements);
        // The same cache on the other device, of which only this entry is asked for.
        const cache = randomCacheOf(single, problem.cache, problem.sizes, entry);
        const one = {
          ...problem,
          sizes: { ...problem.sizes, rows: [rows], keyCounts: [sizes.keyCounts[entry] ?? []] },
          cache,
          queries,
        };
        const alone = await run(single, aloneStream, one);
        const prefix = (sizes.keyCounts[entry]?.[0] ?? NaN) - rows;
        expect(alone.subarray(0, prefix)).toEqual(together.subarray(entry * 900, entry * 900 + prefix));
      }
      problem.cache.dispose();
    },
  );

  it('refuses what does not fit', async () => {
    const random = new Random(24);
    const sizes = { rows: [2], keyCounts: [[6]], kvHeads: 1, group: 2, dim: 8, blockTokens: 4, cacheDType: 'f16' } as const;
    const { cache } = randomProblem(device, random, sizes);
    const slots = device.tensor('i32', ['batch'], [1], cache.slots);
    const queryStart = device.tensor('i32', ['boundary'], [2], cache.queryStart);
    const query = device.tensor('f32', axes, [2, 2, 8], new Float32Array(32));
    const scores = device.tensor('f32', ['batch', 'kvHead', 'token'], [1, 1, 4]);
    const good = { query, scores, blocks: cache.blocks, slots, queryStart, scale: 1 };
    observationScores(stream, good);
    await stream.synchronize();

    const refuse = (wrong: object, error: new (...args: never[]) => Error) => {
      expect(() => observationScores(stream, { ...good, ...wrong })).toThrow(error);
    };
    refuse({ query: device.tensor('f32', axes, [2, 2, 7]) }, ShapeError);
    refuse({ query: device.tensor('i32', axes, [2, 2, 8]) }, DTypeError);
    refuse({ query: open().tensor('f32', axes, [2, 2, 8]) }, DeviceError);
    refuse({ scores: device.tensor('f32', ['batch', 'kvHead', 'token'], [1, 2, 4]) }, ShapeError);
    refuse({ scores: device.tensor('f16', ['batch', 'kvHead', 'token'], [1, 1, 4]) }, DTypeError);
    refuse({ slots: device.tensor('i32', ['batch'], [2]) }, ShapeError);
    refuse({ scale: 0 }, InvalidValueError);
    refuse({ scale: NaN }, InvalidValueError);
    refuse({ domain: 'all' }, InvalidValueError);
    refuse({ groupReduction: 'median' }, InvalidValueError);

    const short = device.tensor('f32', ['batch', 'kvHead', 'token'], [1, 1, 3]);
    const outside = device.tensor('i32', ['batch'], [1], Int32Array.of(1));
    for (const wrong of [{ scores: short }, { slots: outside }]) {
      const failing = device.createStream();
      observationScores(failing, { ...good, ...wrong });
      await expect(failing.synchronize()).rejects.toThrow(InvalidValueError);
      await expect(failing.synchronize()).rejects.toThrow('observationScores');
    }
  });
});

/** One entry of a cache, copied to another device as a cache of its own. */
function randomCacheOf(device: Device, cache: RandomCache, sizes: AttentionSizes, entry: number): RandomCache {
  const { dim, cacheDType, keyCounts, blockTokens } = sizes;
  const [count = NaN] = keyCounts[entry] ?? [];
  const blockCount = Math.ceil(count / blockTokens);
  const numbers = new Float64Array(blockCount * blockTokens * dim);
  for (let key = 0; key < count; key++) numbers.set(cache.key(entry, 0, key), key * dim);
  const elements = encode(cacheDType, numbers);
  const shape = [blockCount, blockTokens, dim] as const;
  const table = Int32Array.from({ length: blockCount }, (_, block) => block);
  const blocks = {
    keys: device.tensor(cacheDType, ['block', 'blockToken', 'dim'], shape, elements),
    values: device.tensor(cacheDType, ['block', 'blockToken', 'dim'], shape, elements),
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, blockCount], table),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(count)),
  };
  const rows = sizes.rows[entry] ?? NaN;
  return { ...cache, blocks, slots: Int32Array.of(0), queryStart: Int32Array.of(0, rows) };
}
