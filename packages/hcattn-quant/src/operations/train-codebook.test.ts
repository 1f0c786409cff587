import { CapabilityError, type Device, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, Random, uniform, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { trainCodebook } from './train-codebook.js';

interface Sizes {
  readonly dtype?: FloatDType;
  readonly kvHeads?: number;
  readonly headDim: number;
  readonly groups: number;
  readonly books?: number;
  readonly centroids: number;
}
interface Settings {
  readonly channelScale?: boolean;
  readonly seed?: number;
  readonly batchVectors?: number;
  readonly firstIteration?: number;
}
interface Trained {
  readonly scale: Float64Array;
  readonly means: Float64Array;
  readonly rounded: Float64Array;
  readonly counts: Float64Array;
}

const bookAxes = ['kvHead', 'book', 'centroid', 'subDim'] as const;

/** Trains in calls of so many iterations, from `start` on where it is given. */
async function train(device: Device, keys: Float64Array, sizes: Sizes, calls: readonly number[], settings: Settings = {}, start?: Trained): Promise<Trained> {
  const { dtype = 'f32', kvHeads = 1, headDim, groups, books = 1, centroids } = sizes;
  const { channelScale = false, seed = 3, batchVectors = 300 } = settings;
  const shape = [kvHeads, books, centroids, headDim / groups] as const;
  const length = shape.reduce((product, extent) => product * extent, 1);
  const tokens = keys.length / kvHeads / headDim;
  using given = device.tensor(dtype, ['kvHead', 'token', 'dim'], [kvHeads, tokens, headDim], encode(dtype, keys));
  using scale = device.tensor('f32', ['kvHead', 'dim'], [kvHeads, headDim], Float32Array.from(start?.scale ?? new Float64Array(kvHeads * headDim)));
  using means = device.tensor('f32', bookAxes, shape, Float32Array.from(start?.means ?? new Float64Array(length)));
  using rounded = device.tensor('f16', bookAxes, shape);
  using counts = device.tensor('i32', ['kvHead', 'book', 'centroid'], [kvHeads, books, centroids], Int32Array.from(start?.counts ?? new Float64Array(kvHeads * books * centroids)));
  using stream = device.createStream();
  let { firstIteration = 0 } = settings;
  for (const iterations of calls) {
    trainCodebook(stream, { keys: given, scale, means, rounded, counts, channelScale, seed, batchVectors, firstIteration, iterations });
    firstIteration += iterations;
  }
  return {
    scale: new Float64Array(await scale.read(stream)),
    means: new Float64Array(await means.read(stream)),
    rounded: decode('f16', await rounded.read(stream)),
    counts: new Float64Array(await counts.read(stream)),
  };
}

const normals = (random: Random, length: number, factor = 1) => Float64Array.from({ length }, () => Math.fround(random.normal() * factor));
const squaredDistance = (one: ArrayLike<number>, other: ArrayLike<number>) =>
  Array.from(one).reduce((sum, x, dim) => sum + (x - (other[dim] ?? NaN)) ** 2, 0);
const rowsOf = (numbers: Float64Array, dims: number) => Array.from({ length: numbers.length / dims }, (_, row) => numbers.slice(row * dims, (row + 1) * dims));
const nearestOf = (means: readonly Float64Array[], vector: Float64Array) => {
  const distances = means.map((mean) => squaredDistance(mean, vector));
  return distances.indexOf(Math.min(...distances));
};
/** Mean squared distance of vectors to their nearest means. */
const lossOf = (vectors: readonly Float64Array[], means: readonly Float64Array[]) =>
  vectors.reduce((sum, vector) => sum + squaredDistance(vector, means[nearestOf(means, vector)] ?? []), 0) / vectors.length;

/** The vectors of each book, in the order in which they are drawn. */
function vectorsOf(keys: Float64Array, scale: Float64Array, { kvHeads = 1, headDim, groups, books = 1 }: Sizes): Float64Array[][] {
  const subDim = headDim / groups;
  const tokens = keys.length / kvHeads / headDim;
  return Array.from({ length: kvHeads * books }, (_, index) => {
    const [kvHead, book] = [Math.floor(index / books), index % books];
    const used = books === 1 ? Array.from({ length: groups }, (_, group) => group) : [book];
    return Array.from({ length: tokens }, (_, token) =>
      used.map((group) =>
        Float64Array.from({ length: subDim }, (_, at) => {
          const dim = group * subDim + at;
          return (keys[(kvHead * tokens + token) * headDim + dim] ?? NaN) / (scale[kvHead * headDim + dim] ?? NaN);
        }),
      ),
    ).flat();
  });
}

/** One iteration from some state on, in 64 bits. */
function oracle(start: Trained, vectors: readonly Float64Array[][], iteration: number, seed: number, batchVectors: number, centroids: number) {
  const subDim = start.means.length / vectors.length / centroids;
  return vectors.flatMap((ofBook, book) => {
    const means = rowsOf(start.means, subDim).slice(book * centroids, (book + 1) * centroids);
    const sums = means.map((mean, c) => mean.map((x) => x * (start.counts[book * centroids + c] ?? NaN)));
    const counts = Array.from(start.counts.subarray(book * centroids, (book + 1) * centroids));
    for (let i = 0; i < batchVectors; i++) {
      const step = book * 2 ** 40 + 2 ** 39 + iteration * batchVectors + i;
      const vector = ofBook[Math.floor(uniform(seed, step) * ofBook.length)] ?? new Float64Array();
      const nearest = nearestOf(means, vector);
      counts[nearest] = (counts[nearest] ?? 0) + 1;
      vector.forEach((x, dim) => ((sums[nearest] ?? vector)[dim] = (sums[nearest]?.[dim] ?? NaN) + x));
    }
    return sums.flatMap((sum, c) => [{ mean: counts[c] === 0 ? means[c] : sum.map((x) => x / (counts[c] ?? NaN)), count: counts[c] }]);
  });
}

function tests({ open }: { readonly open: (threads?: number) => Device }): void {
  const device = open();

  it.each([
    { headDim: 8, groups: 4, centroids: 13 },
    { headDim: 8, groups: 2, centroids: 64, kvHeads: 2, dtype: 'f16' },
    { headDim: 16, groups: 2, centroids: 33, books: 2, dtype: 'bf16' },
    { headDim: 6, groups: 2, centroids: 17, kvHeads: 2, books: 2 },
    { headDim: 5, groups: 5, centroids: 2 },
    { headDim: 32, groups: 1, centroids: 20 },
  ] satisfies Sizes[])('does an iteration as in 64 bits: %j', async (sizes: Sizes) => {
    const random = new Random(sizes.headDim + sizes.centroids);
    const { dtype = 'f32', kvHeads = 1, books = 1, headDim, groups, centroids } = sizes;
    const keys = decode(dtype, encode(dtype, normals(random, kvHeads * 90 * headDim)));
    const start = {
      scale: Float64Array.from({ length: kvHeads * headDim }, () => random.pick([0.5, 1, 2])),
      means: normals(random, (kvHeads * books * centroids * headDim) / groups),
      counts: Float64Array.from({ length: kvHeads * books * centroids }, () => random.integer(0, 40)),
      rounded: new Float64Array(),
    };
    // One that does not end with a look for unused means: these are every 8 centroids / batch iterations.
    const firstIteration = 8 * centroids > 300 ? 0 : 2;
    const settings = { seed: 12, batchVectors: firstIteration === 0 ? 300 : 4 * centroids + 1, firstIteration: firstIteration + 4 };
    const result = await train(device, keys, sizes, [1], settings, start);
    const wanted = oracle(start, vectorsOf(keys, start.scale, sizes), settings.firstIteration, 12, settings.batchVectors, centroids);
    expect(Array.from(result.counts)).toEqual(wanted.map(({ count }) => count));
    rowsOf(result.means, headDim / groups).forEach((mean, index) => {
      mean.forEach((x, dim) => {
        const exact = wanted[index]?.mean?.[dim] ?? NaN;
        // The vectors are quotients in f32, and the mean is rounded once.
        expect(Math.abs(x - exact)).toBeLessThanOrEqual(4 * unitRoundoff.f32 * Math.max(8, Math.abs(exact)));
      });
    });
    result.rounded.forEach((x, index) => expect(x).toBe(decode('f16', encode('f16', [result.means[index] ?? NaN]))[0]));
  });

  it('finds the sub-vectors themselves when there are as many as centroids', async () => {
    const random = new Random(4);
    for (const [subDim, centroids] of [[2, 300], [4, 128], [8, 65], [3, 40]] as const) {
      const distinct = rowsOf(decode('f16', random.elements('f16', centroids * subDim)), subDim);
      const all = Float64Array.from(Array.from({ length: 4 * centroids }, (_, index) => Array.from(distinct[index % centroids] ?? [])).flat());
      const sizes = { headDim: 2 * subDim, groups: 2, centroids };
      const { means, rounded, counts } = await train(device, all, sizes, [30], { batchVectors: 500 });
      const text = (rows: readonly Float64Array[]) => rows.map(String).sort();
      expect(text(rowsOf(means, subDim))).toEqual(text(distinct));
      expect(text(rowsOf(rounded, subDim))).toEqual(text(distinct));
      expect(counts.reduce((sum, count) => sum + count, 0)).toBe(30 * 500);
    }
  });

  it('comes as close to clustered vectors as their own centres are, of which there are half as many', async () => {
    const random = new Random(5);
    const centres = rowsOf(normals(random, 60 * 4, 10), 4);
    const keys = Float64Array.from(Array.from({ length: 2000 }, () => Array.from(random.pick(centres)).map((x) => x + random.normal() * 0.1)).flat());
    const { means } = await train(device, keys, { headDim: 4, groups: 1, centroids: 120 }, [40], { batchVectors: 1000 });
    const vectors = rowsOf(keys, 4);
    expect(lossOf(vectors, rowsOf(means, 4))).toBeLessThan(lossOf(vectors, centres));
  });

  it('begins with vectors that lie apart, none twice', async () => {
    const random = new Random(6);
    const keys = normals(random, 900 * 4);
    const vectors = rowsOf(keys, 2);
    const { means, counts } = await train(device, keys, { headDim: 4, groups: 2, centroids: 100 }, [0]);
    const chosen = rowsOf(means, 2);
    const known = new Set(vectors.map(String));
    expect(chosen.every((mean) => known.has(String(mean)))).toBe(true);
    expect(new Set(chosen.map(String)).size).toBe(100);
    expect(counts.every((count) => count === 0)).toBe(true);
    const drawn = Array.from({ length: 100 }, () => random.pick(vectors));
    expect(lossOf(vectors, chosen)).toBeLessThan(0.8 * lossOf(vectors, drawn));
  });

  it('moves means that no vector is near to where vectors are far from all', async () => {
    const random = new Random(7);
    const keys = normals(random, 500 * 2);
    const start = { scale: Float64Array.of(1, 1), means: new Float64Array(2 * 20).fill(1000), counts: new Float64Array(20), rounded: keys };
    start.means.set([0, 0]);
    const { means, counts } = await train(device, keys, { headDim: 2, groups: 1, centroids: 20 }, [6], { firstIteration: 1 }, start);
    expect(means.every((x) => Math.abs(x) < 10)).toBe(true);
    expect(counts.every((count) => count > 0)).toBe(true);
  });

  it('scales channels by their root mean squares, and a channel of zeros by 1', async () => {
    const random = new Random(8);
    const factors = [1, 100, 0.01, 0];
    const keys = normals(random, 800 * 4).map((x, index) => Math.fround(x * (factors[index % 4] ?? NaN)));
    const sizes = { headDim: 4, groups: 2, centroids: 16 };
    const { scale, means } = await train(device, keys, sizes, [20], { channelScale: true });
    for (const dim of [0, 1, 2]) {
      const ofDim = rowsOf(keys, 4).map((key) => key[dim] ?? NaN);
      const wanted = Math.sqrt(ofDim.reduce((sum, x) => sum + x * x, 0) / ofDim.length);
      expect(Math.abs((scale[dim] ?? NaN) / wanted - 1)).toBeLessThan(unitRoundoff.f32 * 2);
    }
    expect(scale[3]).toBe(1);
    expect(Math.max(...means.map(Math.abs))).toBeLessThan(10);
    expect(Array.from((await train(device, keys, sizes, [1])).scale)).toEqual([1, 1, 1, 1]);
  });

  it('gives the same bits for 1, 2 and 16 threads, and however calls divide the iterations', async () => {
    const keys = normals(new Random(9), 2 * 3000 * 16);
    const sizes = { kvHeads: 2, headDim: 16, groups: 4, books: 4, centroids: 100 };
    const [first, ...others] = await Promise.all([
      train(open(1), keys, sizes, [12], { batchVectors: 1000 }),
      train(open(2), keys, sizes, [12], { batchVectors: 1000 }),
      train(open(16), keys, sizes, [1, 0, 4, 7], { batchVectors: 1000 }),
    ]);
    for (const other of others) expect(other).toEqual(first);
    expect(await train(open(2), keys, sizes, [12], { batchVectors: 1000, seed: 4 })).not.toEqual(first);
  });

  it('keeps what f16 cannot hold at its largest, and ends whatever the numbers are', async () => {
    const random = new Random(10);
    const keys = Float64Array.from({ length: 400 }, () => random.pick([1e6, -1e6, 3e38, -3e38, 1e-40, 0]));
    const { rounded } = await train(device, keys, { headDim: 2, groups: 1, centroids: 8 }, [10]);
    expect(rounded.every((x) => Math.abs(x) <= 65504)).toBe(true);
    const same = await train(device, new Float64Array(400).fill(2), { headDim: 2, groups: 1, centroids: 8 }, [10]);
    expect(same.means.every((x) => x === 2)).toBe(true);
  });

  it('reads keys whose heads and tokens lie apart', async () => {
    const keys = normals(new Random(11), 2 * 50 * 8);
    const sizes = { kvHeads: 2, headDim: 4, groups: 2, centroids: 6 };
    const dense = Float64Array.from(Array.from({ length: 100 }, (_, row) => Array.from(keys.subarray(row * 8 + 4, row * 8 + 8))).flat());
    using whole = device.tensor('f32', ['kvHead', 'token', 'dim'], [2, 50, 8], new Float32Array(keys));
    using scale = device.tensor('f32', ['kvHead', 'dim'], [2, 4]);
    using means = device.tensor('f32', bookAxes, [2, 1, 6, 2]);
    using rounded = device.tensor('f16', bookAxes, [2, 1, 6, 2]);
    using counts = device.tensor('i32', ['kvHead', 'book', 'centroid'], [2, 1, 6]);
    using stream = device.createStream();
    const settings = { channelScale: true, seed: 3, batchVectors: 300, firstIteration: 0, iterations: 5 };
    trainCodebook(stream, { keys: whole.slice('dim', 4, 8), scale, means, rounded, counts, ...settings });
    const wanted = await train(device, dense, sizes, [5], { channelScale: true });
    expect(new Float64Array(await means.read(stream))).toEqual(wanted.means);
  });

  it.each([NaN, Infinity, -Infinity])('refuses keys with %f, and says where', async (number) => {
    const keys = normals(new Random(12), 2 * 40 * 4);
    keys[(40 + 17) * 4 + 2] = number;
    const failed = train(device, keys, { kvHeads: 2, headDim: 4, groups: 2, centroids: 4 }, [1]);
    await expect(failed).rejects.toThrow(/token 17 of kv head 1/);
    await expect(failed).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', () => {
    using stream = device.createStream();
    const tensors = (books = 1, centroids = 6, subDim = 2, tokens = 50) => ({
      keys: device.tensor('f16', ['kvHead', 'token', 'dim'], [2, tokens, 8]),
      scale: device.tensor('f32', ['kvHead', 'dim'], [2, 8]),
      means: device.tensor('f32', bookAxes, [2, books, centroids, subDim]),
      rounded: device.tensor('f16', bookAxes, [2, books, centroids, subDim]),
      counts: device.tensor('i32', ['kvHead', 'book', 'centroid'], [2, books, centroids]),
    });
    const settings = { channelScale: false, seed: 0, batchVectors: 100, firstIteration: 0, iterations: 1 };
    const refuse = (given: object, changed: object, error: new (...args: never[]) => Error) => {
      expect(() => {
        trainCodebook(stream, { ...given, ...settings, ...changed } as never);
      }).toThrow(error);
    };
    refuse(tensors(2), {}, ShapeError);
    refuse(tensors(1, 6, 2, 0), {}, ShapeError);
    refuse(tensors(1, 1), {}, InvalidValueError);
    refuse(tensors(1, 8193), {}, InvalidValueError);
    for (const subDim of [0, 3, 16]) refuse(tensors(1, 6, subDim), {}, InvalidValueError);
    for (const number of [-1, 0.5, NaN, 2 ** 53, '1']) {
      for (const name of ['seed', 'batchVectors', 'firstIteration', 'iterations']) refuse(tensors(), { [name]: number }, InvalidValueError);
    }
    refuse(tensors(), { iterations: 2 ** 31 }, InvalidValueError);
    refuse(tensors(), { firstIteration: 2 ** 24, iterations: 2 ** 24 }, InvalidValueError);
    refuse(tensors(), { channelScale: 1 }, InvalidValueError);
    refuse({ ...tensors(), counts: tensors(4).counts }, {}, ShapeError);
  });
}

describeOnDevices('trainCodebook', (testDevice) => {
  if (testDevice.name !== 'cuda') {
    tests(testDevice);
    return;
  }
  it('is refused, since codebooks are trained on a CPU device', async () => {
    const training = train(testDevice.open(), new Float64Array(400), { headDim: 4, groups: 2, centroids: 4 }, [1]);
    await expect(training).rejects.toThrow(CapabilityError);
  });
});
