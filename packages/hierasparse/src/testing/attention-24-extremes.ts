import type { Device, ElementArray, FloatDType } from '@kv/sparse-core';
import { decode, encode, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect } from 'vitest';
import { blockTokens, sparseDTypes } from '../blocks-24.js';
import { type Attention24, type Cache24, randomCache24, type Sizes24 } from './attention-24-checks.js';

const [kvHeads, group, headDim] = [2, 3, 128];
const keyCounts = [200, 130] as const;

function sizesOf(dtype: Sizes24['dtype'], rows: number): Sizes24 {
  const sparse = { keys: 'some', values: 'some' } as const;
  return { rows: [rows], keyCounts: [keyCounts], kvHeads, group, headDim, dtype, sparse };
}

/** Of the keys, which a cache draws first, one in each row has other elements than all the rest. */
class OneOtherKey extends Random {
  #draws = 0;

  constructor(
    seed: number,
    private readonly token: number,
    private readonly number: number,
    private readonly rest: number,
  ) {
    super(seed);
  }

  override elements<D extends FloatDType>(dtype: D, length: number): ElementArray<D> {
    if (this.#draws++ > 0) return super.elements(dtype, length);
    const rowTokens = length / headDim / kvHeads;
    const tokenOf = (index: number) => Math.floor(index / headDim) % rowTokens;
    return encode(
      dtype,
      Float64Array.from({ length }, (_, index) => (tokenOf(index) === this.token ? this.number : this.rest)),
    );
  }
}

/** Attends with `rows` queries of one number: outputs [token, queryHead, dim] and log-sum-exps [token, queryHead]. */
async function attendWith(
  attention: Attention24,
  device: Device,
  { mixed }: Cache24,
  { rows, dtype, sparse }: Sizes24,
  number: number,
  scale = headDim ** -0.5,
) {
  const shape = [rows[0] ?? NaN, kvHeads * group, headDim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const numbers = new Float64Array(shape[0] * kvHeads * group * headDim).fill(number);
  const query = device.tensor(dtype, axes, shape, encode(dtype, numbers));
  const output = device.tensor(dtype, axes, shape);
  const logSumExp = device.tensor('f32', ['token', 'queryHead'], [shape[0], shape[1]]);
  const sparseOperands = { sparseKeys: sparse.keys !== 'none', sparseValues: sparse.values !== 'none' };
  attention(device.createStream(), { query, output, logSumExp, ...mixed, ...sparseOperands, scale });
  return { output: decode(dtype, await output.read()), logSumExp: await logSumExp.read() };
}

/** Times log2 e exactly 1/8, so that no score is rounded on the way to its weight. */
const exactScale = Math.LN2 / 8;

/** The kv head of a number of log-sum-exps [token, queryHead]. */
const kvHeadOf = (place: number) => Math.floor(place / group) % kvHeads;

/** That outputs [token, queryHead, dim] are a key's value, up to the roundings of its weight and of that, and what all others add. */
function expectValue(output: Float64Array, cache: Cache24, dtype: Sizes24['dtype'], token: number, others = 0): void {
  const excess = output.map((got, index) => {
    const value = cache.number('values', 0, kvHeadOf(Math.floor(index / headDim)), token)[index % headDim] ?? NaN;
    return Math.abs(got - value) - (2 * unitRoundoff[dtype] + 4 * unitRoundoff.f32) * Math.abs(value);
  });
  expect(Math.max(...excess)).toBeLessThanOrEqual(others);
}

/** Where one key outscores all others by far, its value is the output. */
export async function checkLargeScores(attention: Attention24, device: Device, rows: number): Promise<void> {
  for (const dtype of sparseDTypes) {
    const sizes = sizesOf(dtype, rows);
    for (const best of [20, 70, 85]) {
      const cacheOf = (number: number, rest: number) =>
        randomCache24(device, new OneOtherKey(best, best, number, rest), sizes);
      const expectBest = async (cache: Cache24, number: number, scale?: number) => {
        const { output } = await attendWith(attention, device, cache, sizes, number, scale);
        expectValue(output, cache, dtype, best);
      };
      // Scores of 2^24 and, times log2 e, more: f32 counts them by ones and twos.
      await expectBest(await cacheOf(4 * 512, 512), 512);
      // Of 2^30, which f32 counts by 64, an answer comes all the same.
      const large = await cacheOf(4 * 4096, 4096);
      expect((await attendWith(attention, device, large, sizes, 4096)).output.every(Number.isFinite)).toBe(true);
      await expectBest(large, 4096, exactScale);
      // Of -2^110 and less.
      if (dtype === 'bf16') await expectBest(await cacheOf(-(2 ** 53), -(2 ** 55)), 2 ** 55, exactScale);
    }
  }
}

/** Where a key outscores all blocks before it by about 2^126, below which f32 has no factor, its weight is not lost. */
export async function checkLeaps(attention: Attention24, device: Device, rows: number): Promise<void> {
  const best = 85;
  for (const dtype of sparseDTypes) {
    const sizes = sizesOf(dtype, rows);
    // Exponents of 2. A sparse block keeps half of the dims, and so half of the leap.
    for (const leap of [126, 126.5, 127, 127.5, 128, 140, 252, 253, 254, 255, 256, 280]) {
      const cache = await randomCache24(device, new OneOtherKey(best, best, leap / 16, 0), sizes);
      const { output, logSumExp } = await attendWith(attention, device, cache, sizes, 1, exactScale);
      const lost = Array.from(logSumExp, (got, place) => {
        const score = exactScale * cache.number('keys', 0, kvHeadOf(place), best).reduce((sum, number) => sum + number, 0);
        return Math.abs(got / score - 1);
      });
      expect(Math.max(...lost), `${dtype}, 2^${leap}`).toBeLessThanOrEqual(headDim * unitRoundoff.f32);
      // Of the others' values none is as large as 8.
      expectValue(output, cache, dtype, best, 8 * keyCounts[0] * 2 ** (-leap / 2));
    }
  }
}

/** Attends with queries of ones, before and after the last key of the first kv head has become `number` in all dims. */
async function attendSpoilt(attention: Attention24, device: Device, sizes: Sizes24, number: number) {
  const cache = await randomCache24(device, new Random(9), sizes);
  const sound = await attendWith(attention, device, cache, sizes, 1);
  // It is of a dense block, and of the rows only the last one sees it.
  const { dense, table } = cache.mixed.keys;
  const token = keyCounts[0] - 1;
  const block = (await table.read())[Math.floor(token / blockTokens)] ?? NaN;
  const row = dense
    .slice('block', block, block + 1)
    .slice('blockToken', token % blockTokens, (token % blockTokens) + 1);
  const stream = device.createStream();
  stream.write(row, encode(sizes.dtype, new Float64Array(headDim).fill(number)));
  await stream.synchronize();
  return { sound, spoilt: await attendWith(attention, device, cache, sizes, 1) };
}

const queryHeads = kvHeads * group;

/** Whether a row's query head sees the key that `attendSpoilt` changes. */
const seesLastKey = (place: number, rows: number) =>
  Math.floor(place / queryHeads) === rows - 1 && place % queryHeads < group;

/** A key that is NaN, or outscores all others infinitely, shows in the rows that see it, and changes nothing in others. */
export async function checkNaNShows(attention: Attention24, device: Device, rows: number): Promise<void> {
  for (const dtype of sparseDTypes) {
    for (const number of [NaN, Infinity]) {
      const { sound, spoilt } = await attendSpoilt(attention, device, sizesOf(dtype, rows), number);
      const shown = (got: number, place: number) => (seesLastKey(place, rows) ? NaN : got);
      expect(spoilt.logSumExp).toEqual(sound.logSumExp.map(shown));
      expect(spoilt.output).toEqual(sound.output.map((got, index) => shown(got, Math.floor(index / headDim))));
    }
  }
}

/** A key whose score is minus infinity weighs nothing: the last row has the bits of the one before, which does not see it. */
export async function checkMinusInfinity(attention: Attention24, device: Device, rows: number): Promise<void> {
  for (const dtype of sparseDTypes) {
    const { sound, spoilt } = await attendSpoilt(attention, device, sizesOf(dtype, rows), -Infinity);
    const source = (place: number) => (seesLastKey(place, rows) ? place - queryHeads : place);
    expect(spoilt.logSumExp).toEqual(sound.logSumExp.map((_, place) => sound.logSumExp[source(place)] ?? NaN));
    const of = (index: number) => source(Math.floor(index / headDim)) * headDim + (index % headDim);
    expect(spoilt.output).toEqual(sound.output.map((_, index) => sound.output[of(index)] ?? NaN));
  }
}
