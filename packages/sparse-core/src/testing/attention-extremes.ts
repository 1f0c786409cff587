import { expect } from 'vitest';
import type { FloatDType } from '../dtype.js';
import type { AttentionArguments } from '../operations/attention-arguments.js';
import type { Device, Stream } from '../handles.js';
import type { PagedBlocks } from '../paged-blocks.js';
import { randomCache } from './attention-oracle.js';
import { decode, encode, type Random, unitRoundoff } from './random.js';

type Attention = (stream: Stream, args: AttentionArguments) => void;

/** Outputs [token, queryHead, dim] and log-sum-exps [token, queryHead], as numbers. */
interface Results {
  readonly output: Float64Array;
  readonly logSumExp: Float32Array;
}

const [kvHeads, group, dim, blockTokens] = [2, 3, 128, 16];
const keyCounts = [200, 130] as const;

/** A sequence, with ways to change one token's key and to attend to it with `rows` queries of one number. */
async function sequence(attention: Attention, device: Device, random: Random, dtype: FloatDType, rows: number) {
  const stream = device.createStream();
  const sizes = { rows: [rows], keyCounts: [keyCounts], kvHeads, group, dim, blockTokens, cacheDType: dtype };
  const cache = randomCache(device, random, sizes);
  const { keys, blockTable }: PagedBlocks = cache.blocks;
  const table = await blockTable.read();
  const slots = device.tensor('i32', ['batch'], [1], cache.slots);
  const queryStart = device.tensor('i32', ['boundary'], [2], cache.queryStart);
  return {
    cache,
    writeEveryKey: (number: number): void => {
      const elements = keys.shape.reduce((product, extent) => product * extent, 1);
      stream.write(keys, encode(dtype, new Float64Array(elements).fill(number)));
    },
    writeKey: (kvHead: number, token: number, number: number): void => {
      const width = table.length / kvHeads;
      const block = table[kvHead * width + Math.floor(token / blockTokens)] ?? NaN;
      const row = keys.slice('block', block, block + 1).slice('blockToken', token % blockTokens, (token % blockTokens) + 1);
      stream.write(row, encode(dtype, new Float64Array(dim).fill(number)));
    },
    attend: async (number: number, scale = dim ** -0.5): Promise<Results> => {
      const shape = [rows, kvHeads * group, dim] as const;
      const axes = ['token', 'queryHead', 'dim'] as const;
      const numbers = new Float64Array(rows * kvHeads * group * dim).fill(number);
      using query = device.tensor(dtype, axes, shape, encode(dtype, numbers));
      using output = device.tensor(dtype, axes, shape);
      using logSumExp = device.tensor('f32', ['token', 'queryHead'], [rows, kvHeads * group]);
      const args = { query, output, logSumExp, blocks: cache.blocks, slots, queryStart, scale };
      attention(stream, args);
      return { output: decode(dtype, await output.read()), logSumExp: await logSumExp.read() };
    },
  };
}

/** Times log2 e exactly 1/8, so that no score is rounded on the way to its weight. */
const exactScale = Math.LN2 / 8;

/** Where one key outscores all others by far, its value is the output, up to the roundings of its weight and of that. */
export async function checkLargeScores(attention: Attention, device: Device, random: Random, rows: number): Promise<void> {
  const [best, number] = [70, 512];
  for (const dtype of ['f32', 'f16', 'bf16'] as const) {
    const { cache, writeEveryKey, writeKey, attend } = await sequence(attention, device, random, dtype, rows);
    // Scores of 2^24 and, times log2 e, more: f32 counts them by ones and twos.
    writeEveryKey(number);
    for (let kvHead = 0; kvHead < kvHeads; kvHead++) writeKey(kvHead, best, 4 * number);
    const expectBest = ({ output }: Results) => {
      const excess = output.map((got, index) => {
        const kvHead = Math.floor(index / dim / group) % kvHeads;
        const value = cache.value(0, kvHead, best)[index % dim] ?? NaN;
        return Math.abs(got - value) - (2 * unitRoundoff[dtype] + 4 * unitRoundoff.f32) * Math.abs(value);
      });
      expect(Math.max(...excess)).toBeLessThanOrEqual(0);
    };
    expectBest(await attend(number));
    // Of 2^30, which f32 counts by 64, an answer comes all the same.
    writeEveryKey(8 * number);
    for (let kvHead = 0; kvHead < kvHeads; kvHead++) writeKey(kvHead, best, 32 * number);
    expect((await attend(8 * number)).output.every(Number.isFinite)).toBe(true);
    expectBest(await attend(8 * number, exactScale));
    if (dtype !== 'f16') {
      // Scores of -2^110 and less.
      writeEveryKey(-(2 ** 55));
      for (let kvHead = 0; kvHead < kvHeads; kvHead++) writeKey(kvHead, best, -(2 ** 53));
      expectBest(await attend(2 ** 55, exactScale));
    }
    cache.dispose();
  }
}

const queryHeads = kvHeads * group;

/** Attends with queries of ones, before and after the last key of the first kv head has become `number` in all dims. */
async function attendSpoilt(attention: Attention, device: Device, random: Random, dtype: FloatDType, rows: number, number: number) {
  const { cache, writeKey, attend } = await sequence(attention, device, random, dtype, rows);
  const sound = await attend(1);
  writeKey(0, keyCounts[0] - 1, number);
  const spoilt = await attend(1);
  cache.dispose();
  return { sound, spoilt };
}

/** Whether a row's query head sees the key that `attendSpoilt` changes: of the rows only the last one does. */
const seesLastKey = (place: number, rows: number) =>
  Math.floor(place / queryHeads) === rows - 1 && place % queryHeads < group;

/** A key that is NaN, or outscores all others infinitely, shows in the rows that see it, and changes nothing in others. */
export async function checkNaNShows(attention: Attention, device: Device, random: Random, rows: number): Promise<void> {
  for (const dtype of ['f32', 'f16', 'bf16'] as const) {
    for (const number of [NaN, Infinity]) {
      const { sound, spoilt } = await attendSpoilt(attention, device, random, dtype, rows, number);
      const shown = (got: number, place: number) => (seesLastKey(place, rows) ? NaN : got);
      expect(spoilt.logSumExp).toEqual(sound.logSumExp.map(shown));
      expect(spoilt.output).toEqual(sound.output.map((got, index) => shown(got, Math.floor(index / dim))));
    }
  }
}

/** A key whose score is minus infinity weighs nothing: the last row has the bits of the one before, which does not see it. */
export async function checkMinusInfinity(attention: Attention, device: Device, random: Random, rows: number): Promise<void> {
  for (const dtype of ['f32', 'f16', 'bf16'] as const) {
    const { sound, spoilt } = await attendSpoilt(attention, device, random, dtype, rows, -Infinity);
    const source = (place: number) => (seesLastKey(place, rows) ? place - queryHeads : place);
    expect(spoilt.logSumExp).toEqual(sound.logSumExp.map((_, place) => sound.logSumExp[source(place)] ?? NaN));
    const of = (index: number) => source(Math.floor(index / dim)) * dim + (index % dim);
    expect(spoilt.output).toEqual(sound.output.map((_, index) => sound.output[of(index)] ?? NaN));
  }
}
