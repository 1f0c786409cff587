import { type Device, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { runningMeans } from './running-means.js';

const [blocks, valueBlocks] = [6, 8];
const untouched = -128;
/** Three heads: one of three blocks, one that goes on from block 7, one of one block. */
const list = { from: [4, 0, 2, 5, 1], to: [1, 6, 3, 0, 5], before: [-1, 1, 6, 7, -1], counts: [1, 2, 3, 4, 1] };

async function sumUp(device: Device, dtype: FloatDType, headDim: number, numbers: Float64Array) {
  // One dim more than is used, so that strides are not those of the shape.
  const whole = device.tensor(dtype, ['block', 'blockToken', 'dim'], [blocks, 64, headDim + 1], encode(dtype, numbers));
  const sums = await device.hostTensor('f32', ['valueBlock', 'dim'], [valueBlocks, headDim]);
  const means = await device.hostTensor(dtype, ['valueBlock', 'dim'], [64, headDim]);
  const stream = device.createStream();
  stream.write(sums, new Float32Array(valueBlocks * headDim).fill(untouched));
  stream.write(means, encode(dtype, new Float64Array(64 * headDim).fill(untouched)));
  runningMeans(stream, { values: whole.slice('dim', 0, headDim), sums, means, ...list });
  return { sums: await sums.read(stream), means: decode(dtype, await means.read(stream)) };
}

describeOnDevices('runningMeans', ({ open }) => {
  it.each(['f32', 'f16', 'bf16'] as const)('sums values of %s head by head, in the order of tokens, and divides', async (dtype) => {
    const device = open();
    for (const headDim of [1, 40, 200]) {
      const random = new Random(headDim);
      const numbers = Float64Array.from({ length: blocks * 64 * (headDim + 1) }, () => random.normal() + 1);
      const stored = decode(dtype, encode(dtype, numbers));
      const wanted = new Map<number, Float32Array>([[7, new Float32Array(headDim).fill(untouched)]]);
      list.to.forEach((to, index) => {
        const sum = Float32Array.from(wanted.get(list.before[index] ?? NaN) ?? new Float32Array(headDim));
        for (let token = 0; token < 64; token++) {
          const first = ((list.from[index] ?? NaN) * 64 + token) * (headDim + 1);
          for (let dim = 0; dim < headDim; dim++) sum[dim] = (sum[dim] ?? NaN) + (stored[first + dim] ?? NaN);
        }
        wanted.set(to, sum);
      });
      const { sums, means } = await sumUp(device, dtype, headDim, numbers);
      for (let block = 0; block < 64; block++) {
        const own = list.to.indexOf(block);
        const mean = means.subarray(block * headDim, (block + 1) * headDim);
        if (own === -1) {
          expect(mean.every((x) => x === untouched)).toBe(true);
          continue;
        }
        const sum = wanted.get(block) ?? new Float32Array();
        expect(sums.subarray(block * headDim, (block + 1) * headDim)).toEqual(sum);
        expect(mean).toEqual(decode(dtype, encode(dtype, Float64Array.from(sum, (x) => Math.fround(x / (64 * (list.counts[own] ?? NaN)))))));
      }
    }
  });

  it('keeps a number that is not finite in its head and dim', async () => {
    const numbers = new Float64Array(blocks * 64 * 3).fill(1);
    numbers[3 * 64 * 4 + 1] = NaN; // dim 1 of the first token of block 4
    const { means } = await sumUp(open(), 'f16', 2, numbers);
    const dims = (block: number) => Array.from(means.subarray(block * 2, block * 2 + 2));
    for (const block of [1, 6, 3]) expect(dims(block)).toEqual([1, NaN]);
    expect(dims(5)).toEqual([1, 1]);
  });

  it('refuses bad input with a typed error', () => {
    const device = open();
    const stream = device.createStream();
    const rows = (dtype: FloatDType, count: number, headDim = 8) => device.tensor(dtype, ['valueBlock', 'dim'], [count, headDim]);
    const good = {
      values: device.tensor('f16', ['block', 'blockToken', 'dim'], [blocks, 64, 8]),
      sums: rows('f32', valueBlocks) as never,
      means: rows('f16', valueBlocks),
      ...list,
    };
    expectRefusals(runningMeans, stream, good, [
      [{ means: rows('bf16', valueBlocks) }, DTypeError],
      [{ sums: rows('f16', valueBlocks) }, DTypeError],
      [{ means: rows('f16', valueBlocks, 9) }, ShapeError],
      [{ means: rows('f16', valueBlocks - 1) }, InvalidValueError],
      [{ from: [6, 0, 2, 5, 1] }, InvalidValueError],
      [{ to: [1, 6, 3, 0, 1] }, InvalidValueError],
      [{ to: [1, 6, 3, 0] }, ShapeError],
      [{ before: [-2, 1, 6, 7, -1] }, InvalidValueError],
      [{ before: [-1, 1, 6, 1, -1] }, InvalidValueError],
      [{ before: [1, 1, 6, 7, -1] }, InvalidValueError],
      [{ counts: [0, 2, 3, 4, 1] }, InvalidValueError],
    ]);
    runningMeans(stream, good);
  });
});
