import { expect, it } from 'vitest';
import type { FloatDType } from '../dtype.js';
import { ShapeError } from '../errors.js';
import { attentionRow, randomCache } from '../testing/attention-oracle.js';
import { decode, encode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { mergeAttention } from './merge-attention.js';
import { prefillAttention } from './prefill-attention.js';

const axes = ['token', 'queryHead', 'dim'] as const;
const headAxes = ['token', 'queryHead'] as const;

describeOnDevices('mergeAttention', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  function part(dtype: FloatDType, [tokens, heads, dims]: readonly [number, number, number], output: ArrayLike<number>, logSumExp: ArrayLike<number>) {
    return {
      output: device.tensor(dtype, axes, [tokens, heads, dims], encode(dtype, output)),
      logSumExp: device.tensor('f32', headAxes, [tokens, heads], Float32Array.from(logSumExp)),
    };
  }

  it.each([
    { shape: [1, 1, 1], dtype: 'f32', other: 'f32' },
    { shape: [3, 5, 64], dtype: 'f32', other: 'f16' },
    { shape: [70, 4, 128], dtype: 'f16', other: 'f16' },
    { shape: [2, 3, 17], dtype: 'bf16', other: 'f32' },
  ] as const)('is the weighted sum of two parts: $shape, $dtype and $other', async ({ shape, dtype, other }) => {
    const random = new Random(1);
    const [rows, dims] = [shape[0] * shape[1], shape[2]];
    const numbers = (count: number, scale: number) => Float64Array.from({ length: count }, () => scale * random.normal());
    const [one, two] = [dtype, other].map((each) => decode(each, encode(each, numbers(rows * dims, 1)))) as [Float64Array, Float64Array];
    // Some rows of which either part decides, and sums beyond the range of exp.
    const [l1, l2] = [numbers(rows, 30), numbers(rows, 30)].map((l) => Float32Array.from(l, (x) => x + 100)) as [Float32Array, Float32Array];
    const merged = part(dtype, shape, one, l1);
    mergeAttention(stream, { ...merged, other: part(other, shape, two, l2) });
    const output = decode(dtype, await merged.output.read(stream));
    const logSumExp = await merged.logSumExp.read(stream);
    for (let row = 0; row < rows; row++) {
      const [a = NaN, b = NaN] = [l1[row], l2[row]];
      const most = Math.max(a, b);
      const total = most + Math.log(Math.exp(a - most) + Math.exp(b - most));
      // A difference that rounds by its size, two exponentials of 2 roundings, a sum and a logarithm.
      const error = (Math.abs(a - b) * Math.min(1, Math.exp(-Math.abs(a - b))) + 8) * unitRoundoff.f32;
      expect(Math.abs((logSumExp[row] ?? NaN) - total)).toBeLessThanOrEqual(error + 2 * unitRoundoff.f32 * Math.abs(total));
      for (let dim = row * dims; dim < (row + 1) * dims; dim++) {
        const [x, y] = [Math.exp(a - total) * (one[dim] ?? NaN), Math.exp(b - total) * (two[dim] ?? NaN)];
        const allowed = 2 * error * (Math.abs(x) + Math.abs(y)) + unitRoundoff[dtype] * Math.abs(x + y) + 2 ** -25;
        expect(Math.abs((output[dim] ?? NaN) - x - y)).toBeLessThanOrEqual(allowed);
      }
    }
  });

  it('leaves one part as it is where the other has seen no key, and shows NaN in its row alone', async () => {
    const numbers = [0.5, -0.25, 3, 1.5, -2, 0.125, 7, 0];
    const zeros = numbers.map(() => 0);
    const [none, shape] = [-Infinity, [4, 1, 2]] as const;
    const merged = part('f32', shape, [0.5, -0.25, 0, 0, 0, 0, 7, 1], [2.5, none, none, NaN]);
    mergeAttention(stream, { ...merged, other: part('f32', shape, [...zeros.slice(0, 2), 3, 1.5, 0, 0, 1, 1], [none, -1.5, none, 1]) });
    expect([...(await merged.output.read(stream))]).toEqual([0.5, -0.25, 3, 1.5, 0, 0, NaN, NaN]);
    expect([...(await merged.logSumExp.read(stream))]).toEqual([2.5, -1.5, none, NaN]);
  });

  it('makes attention over all keys of attention over two parts of them', async () => {
    const random = new Random(2);
    const dtype = device.kind === 'cuda' ? 'f16' : 'f32';
    const sizes = { rows: [4, 4], keyCounts: [[70, 130], [9, 64]], kvHeads: 2, group: 2, dim: 64, blockTokens: 64, cacheDType: 'f16' } as const;
    const cache = randomCache(device, random, { ...sizes, rowDType: dtype });
    const elements = random.elements(dtype, 4 * 4 * 64);
    const row = (slots: Int32Array) => ({
      query: device.tensor(dtype, axes, [4, 4, 64], elements),
      blocks: cache.blocks,
      slots: device.tensor('i32', ['batch'], [1], slots),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 4)),
      scale: 0.125,
      causal: false,
    });
    // The two entries of the cache are the two parts.
    const parts = [0, 1].map(() => ({ output: device.tensor(dtype, axes, [4, 4, 64]), logSumExp: device.tensor('f32', headAxes, [4, 4]) }));
    const [one, other] = parts as [(typeof parts)[0], (typeof parts)[0]];
    for (const [entry, each] of parts.entries()) {
      prefillAttention(stream, { ...row(cache.slots.subarray(entry, entry + 1)), ...each });
    }
    mergeAttention(stream, { ...one, other });
    const [output, logSumExp, queries] = [decode(dtype, await one.output.read(stream)), await one.logSumExp.read(stream), decode(dtype, elements)];
    for (let head = 0; head < 16; head++) {
      const kvHead = Math.floor((head % 4) / 2);
      const first = sizes.keyCounts[0][kvHead] ?? NaN;
      const all = first + (sizes.keyCounts[1][kvHead] ?? NaN);
      const at = (of: 'key' | 'value') => (token: number) => (token < first ? cache[of](0, kvHead, token) : cache[of](1, kvHead, token - first));
      // Weights, both parts and their sum round to the rows' dtype on a GPU.
      const roundoff = device.kind === 'cuda' ? 3 * unitRoundoff.f16 : 0;
      const wanted = attentionRow(queries.subarray(head * 64, (head + 1) * 64), all, 0.125, at('key'), at('value'), roundoff);
      expect(Math.abs((logSumExp[head] ?? NaN) - wanted.logSumExp)).toBeLessThanOrEqual(wanted.logSumExpError + 8 * unitRoundoff.f32);
      wanted.output.forEach((x, dim) => {
        const allowed = 2 * wanted.outputError + unitRoundoff[dtype] * Math.abs(x) + 2 ** -25;
        expect(Math.abs((output[head * 64 + dim] ?? NaN) - x)).toBeLessThanOrEqual(allowed);
      });
    }
  });

  it('takes rows that lie apart, and refuses parts of other shapes', async () => {
    const packed = device.tensor('f32', axes, [2, 4, 8], new Float32Array(64).fill(1));
    const own = { output: packed.slice('queryHead', 0, 2), logSumExp: device.tensor('f32', headAxes, [2, 2], new Float32Array(4)) };
    const other = { output: packed.slice('queryHead', 2, 4), logSumExp: device.tensor('f32', headAxes, [2, 2], new Float32Array(4)) };
    mergeAttention(stream, { ...own, other });
    expect(new Set(await own.output.read(stream))).toEqual(new Set([1]));
    const wrong = { ...other, output: packed.slice('queryHead', 1, 4) };
    expect(() => mergeAttention(stream, { ...own, other: wrong })).toThrow(ShapeError);
  });
});
