import { DeviceError, DTypeError, InvalidValueError, ShapeError, type FloatDType } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, Random, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { loadValues } from './load-values.js';

const valueAxes = ['valueBlock', 'blockToken', 'dim'] as const;
const blockAxes = ['block', 'blockToken', 'dim'] as const;

describeOnDevices('loadValues', ({ open }: TestDevice) => {
  const device = open();
  const stream = device.createStream();

  /** A pool of 5 blocks in host memory, of codes if there are `scales`, and dense blocks of 7s. */
  async function pools(dtype: FloatDType, dim: number, scaled: boolean) {
    const random = new Random(dim);
    const elements = 5 * 64 * dim;
    const hostValues = await device.hostTensor(scaled ? 'i8' : dtype, valueAxes, [5, 64, dim]);
    const held = scaled ? Int8Array.from({ length: elements }, () => random.integer(-127, 127)) : random.elements(dtype, elements);
    stream.write(hostValues, held);
    const scales = random.elements('bf16', 5 * 64);
    const valueScales = scaled ? device.tensor('bf16', ['valueBlock', 'blockToken'], [5, 64], scales) : undefined;
    const values = device.tensor(dtype, blockAxes, [4, 64, dim], encode(dtype, new Float64Array(4 * 64 * dim).fill(7)));
    const numbers = scaled ? Float64Array.from(held) : decode(dtype, held);
    const factors = decode('bf16', scales);
    const wanted = numbers.map((number, index) => (scaled ? Math.fround(number * (factors[Math.floor(index / dim)] ?? NaN)) : number));
    return { hostValues, valueScales, values, wanted };
  }

  it.each([
    { dtype: 'f16', dim: 64, scaled: false },
    { dtype: 'bf16', dim: 128, scaled: false },
    { dtype: 'f32', dim: 3, scaled: false },
    { dtype: 'f16', dim: 5, scaled: false },
    { dtype: 'f16', dim: 64, scaled: true },
    { dtype: 'bf16', dim: 17, scaled: true },
    { dtype: 'f32', dim: 64, scaled: true },
  ] as const)('writes $dtype blocks of $dim dims, codes: $scaled', async ({ dtype, dim, scaled }) => {
    const { wanted, ...args } = await pools(dtype, dim, scaled);
    loadValues(stream, { ...args, from: [4, 0, 4], to: [1, 3, 2] });
    const got = await args.values.read(stream);
    const block = (numbers: ArrayLike<number>, index: number) => Array.from(numbers).slice(index * 64 * dim, (index + 1) * 64 * dim);
    const rounded = encode(dtype, wanted);
    expect(block(got, 1)).toEqual(block(rounded, 4));
    expect(block(got, 2)).toEqual(block(rounded, 4));
    expect(block(got, 3)).toEqual(block(rounded, 0));
    expect(block(got, 0)).toEqual(Array.from(encode(dtype, new Float64Array(64 * dim).fill(7))));
  });

  it('writes to blocks that lie apart', async () => {
    const { wanted, ...args } = await pools('f16', 8, false);
    using wide = device.tensor('f16', blockAxes, [4, 64, 16], new Uint16Array(4 * 64 * 16));
    loadValues(stream, { ...args, values: wide.slice('dim', 8, 16), from: [2], to: [3] });
    const rows = decode('f16', await wide.read(stream));
    const got = Array.from(rows.subarray(3 * 64 * 16)).filter((_, index) => index % 16 >= 8);
    expect(got).toEqual(Array.from(wanted.subarray(2 * 64 * 8, 3 * 64 * 8)));
    expect(rows.filter((_, index) => index < 3 * 64 * 16 || index % 16 < 8).every((number) => number === 0)).toBe(true);
  });

  it('refuses what does not fit, and changes nothing', async () => {
    const { hostValues, values } = await pools('f16', 64, false);
    const codes = await pools('f16', 64, true);
    const before = await values.read(stream);
    const call = (given: object) => () => loadValues(stream, { hostValues, values, from: [0], to: [0], ...given });
    expect(call({ hostValues: codes.hostValues })).toThrow(DTypeError);
    expect(call({ valueScales: codes.valueScales })).toThrow(DTypeError);
    expect(call({ values: device.tensor('bf16', blockAxes, [4, 64, 64]) })).toThrow(DTypeError);
    expect(call({ values: device.tensor('f16', blockAxes, [4, 64, 32]) })).toThrow(ShapeError);
    expect(call({ from: [0, 1] })).toThrow(ShapeError);
    expect(call({ values: open().tensor('f16', blockAxes, [4, 64, 64]) })).toThrow(DeviceError);
    for (const wrong of [{ from: [5] }, { to: [4] }, { from: [0, 1], to: [2, 2] }]) expect(call(wrong)).toThrow(InvalidValueError);
    await stream.synchronize();
    expect(await values.read(stream)).toEqual(before);
  });
});
