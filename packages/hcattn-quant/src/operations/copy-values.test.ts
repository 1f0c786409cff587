import { type Device, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { copyValues } from './copy-values.js';

const [blocks, valueBlocks] = [5, 7];
const from = [4, 0, 2];
const to = [1, 6, 3];

async function copy(device: Device, dtype: FloatDType, headDim: number, numbers: Float64Array, codes: boolean) {
  // One dim more than is used, so that strides are not those of the shape.
  const whole = device.tensor(dtype, ['block', 'blockToken', 'dim'], [blocks, 64, headDim + 1], encode(dtype, numbers));
  const hostValues = await device.hostTensor(codes ? 'i8' : dtype, ['valueBlock', 'blockToken', 'dim'], [valueBlocks, 64, headDim]);
  const valueScales = device.tensor('bf16', ['valueBlock', 'blockToken'], [valueBlocks, 64], new Uint16Array(valueBlocks * 64));
  const stream = device.createStream();
  stream.write(hostValues, encodedAs(codes ? 'i8' : dtype, valueBlocks * 64 * headDim));
  const values = whole.slice('dim', 0, headDim);
  copyValues(stream, { values, hostValues, valueScales: codes ? valueScales : undefined, from, to });
  return { values: await hostValues.read(stream), scales: decode('bf16', await valueScales.read(stream)) };
}

/** What no copy writes. */
const encodedAs = (dtype: FloatDType | 'i8', length: number) =>
  dtype === 'i8' ? new Int8Array(length).fill(-128) : encode(dtype, new Float64Array(length).fill(-128));

const numbersOf = (random: Random, headDim: number) =>
  Float64Array.from({ length: blocks * 64 * (headDim + 1) }, () => random.normal() * 2 ** random.integer(-12, 3));

const dtypes = ['f32', 'f16', 'bf16'] as const;
const halfToEven = (x: number) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

describeOnDevices('copyValues', ({ open }) => {
  it.each(dtypes)('copies blocks of %s as they are, and no others', async (dtype) => {
    const device = open();
    for (const headDim of [1, 40, 128]) {
      const numbers = numbersOf(new Random(headDim), headDim);
      const stored = decode(dtype, encode(dtype, numbers));
      const copied = decode(dtype, (await copy(device, dtype, headDim, numbers, false)).values);
      const wanted = copied.map((_, index) => {
        const block = from[to.indexOf(Math.floor(index / (64 * headDim)))];
        const token = Math.floor(index / headDim) % 64;
        return block === undefined ? -128 : (stored[(block * 64 + token) * (headDim + 1) + (index % headDim)] ?? NaN);
      });
      expect(copied).toEqual(wanted);
    }
  });

  it.each(dtypes)('writes the codes and scales of its definition for %s', async (dtype) => {
    const device = open();
    for (const headDim of [1, 40, 128]) {
      const numbers = numbersOf(new Random(headDim), headDim);
      numbers.fill(0, 0, headDim); // a token of zeros, of block 0
      numbers.fill(headDim > 1 ? NaN : 0, headDim + 2, headDim + 3); // and one with a NaN
      const stored = decode(dtype, encode(dtype, numbers));
      const copied = await copy(device, dtype, headDim, numbers, true);
      for (let row = 0; row < valueBlocks * 64; row++) {
        const block = from[to.indexOf(Math.floor(row / 64))];
        const own = copied.values.subarray(row * headDim, (row + 1) * headDim);
        const scale = copied.scales[row] ?? NaN;
        if (block === undefined) {
          expect(own.every((code) => code === -128)).toBe(true);
          continue;
        }
        const first = (block * 64 + (row % 64)) * (headDim + 1);
        const exact = stored.subarray(first, first + headDim);
        if (exact.some(Number.isNaN)) {
          expect(scale).toBeNaN();
          continue;
        }
        const step = Math.fround(Math.max(...exact.map(Math.abs)) / 127);
        expect(scale).toBeGreaterThanOrEqual(step);
        expect(scale).toBeLessThan(step * (1 + 2 ** -7) + 2 ** -133);
        const codes = exact.map((number) => (scale === 0 ? 0 : halfToEven(Math.fround(number / scale)) + 0));
        expect(Float64Array.from(own)).toEqual(codes);
      }
    }
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const stream = device.createStream();
    const axes = ['block', 'blockToken', 'dim'] as const;
    const poolAxes = ['valueBlock', 'blockToken', 'dim'] as const;
    const good = {
      values: device.tensor('f16', axes, [blocks, 64, 8]),
      hostValues: await device.hostTensor('f16', poolAxes, [valueBlocks, 64, 8]),
      from,
      to,
    };
    const valueScales = device.tensor('bf16', ['valueBlock', 'blockToken'], [valueBlocks, 64]);
    expectRefusals(copyValues, stream, good, [
      [{ hostValues: device.tensor('i8', poolAxes, [valueBlocks, 64, 8]) }, DTypeError],
      [{ hostValues: device.tensor('bf16', poolAxes, [valueBlocks, 64, 8]) }, DTypeError],
      [{ valueScales }, DTypeError],
      [{ hostValues: device.tensor('f16', poolAxes, [valueBlocks, 64, 9]) }, ShapeError],
      [{ hostValues: device.tensor('f16', poolAxes, [valueBlocks, 32, 8]) }, ShapeError],
      [{ from: [5, 0, 1] }, InvalidValueError],
      [{ to: [0, 1, 1] }, InvalidValueError],
      [{ to: [0, 1] }, ShapeError],
    ]);
  });
});
