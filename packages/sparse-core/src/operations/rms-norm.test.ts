import { expect, it } from 'vitest';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import type { FloatDType } from '../dtype.js';
import { decode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { rmsNorm } from './rms-norm.js';

function oracle(input: Float64Array, weight: Float64Array, epsilon: number): Float64Array {
  const features = weight.length;
  return input.map((_, index) => {
    const start = index - (index % features);
    const row = input.subarray(start, start + features);
    const meanSquare = row.reduce((sum, x) => sum + x * x, 0) / features;
    return ((input[index] ?? NaN) / Math.sqrt(meanSquare + epsilon)) * (weight[index % features] ?? NaN);
  });
}

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];

describeOnDevices('rmsNorm', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('matches the float64 oracle over random shapes, strides and dtypes', async () => {
    const random = new Random(1);
    for (let round = 0; round < 60; round++) {
      const [tokens, heads, dim] = [random.integer(1, 9), random.integer(1, 5), random.integer(1, 200)];
      const [dtype, weightDType] = [random.pick(floats), random.pick(floats)];
      const epsilon = random.pick([1e-5, 1e-6, 0.1]);
      const shape = [tokens + 2, heads, dim] as const;
      const input = random.elements(dtype, (tokens + 2) * heads * dim, random.pick([0.01, 1, 30]));
      const weight = random.elements(weightDType, dim);
      using inputTensor = device.tensor(dtype, ['token', 'head', 'dim'], shape, input);
      using weightTensor = device.tensor(weightDType, ['dim'], [dim], weight);
      using output = device.tensor(dtype, ['token', 'head', 'dim'], shape);
      rmsNorm(stream, {
        input: inputTensor.slice('token', 1, tokens + 1),
        weight: weightTensor,
        output: output.slice('token', 1, tokens + 1),
        epsilon,
      });
      const actual = decode(dtype, await output.slice('token', 1, tokens + 1).read());
      const rows = decode(dtype, input).subarray(heads * dim, (tokens + 1) * heads * dim);
      const expected = oracle(rows, decode(weightDType, weight), epsilon);
      // The mean of `dim` squares in f32, its root, two products, and the rounding to the output's dtype.
      const relative = (dim + 8) * unitRoundoff.f32 + unitRoundoff[dtype];
      const wrong = Array.from(actual, (value, index) => {
        const wanted = expected[index] ?? NaN;
        return { value, wanted, holds: Math.abs(value - wanted) <= relative * Math.abs(wanted) + 2 ** -25 };
      }).filter(({ holds }) => !holds);
      expect(wrong).toEqual([]);
    }
  });

  it('works in place', async () => {
    const data = new Random(2).elements('f32', 3 * 64);
    using rows = device.tensor('f32', ['token', 'hidden'], [3, 64], data);
    using weight = device.tensor('f32', ['hidden'], [64], new Float32Array(64).fill(2));
    rmsNorm(stream, { input: rows, weight, output: rows, epsilon: 1e-5 });
    const expected = oracle(Float64Array.from(data), new Float64Array(64).fill(2), 1e-5);
    const actual = await rows.read();
    actual.forEach((value, index) => {
      expect(value).toBeCloseTo(expected[index] ?? NaN, 5);
    });
  });

  it('refuses bad input with a typed error', () => {
    using rows = device.tensor('f32', ['token', 'hidden'], [3, 8]);
    using narrow = device.tensor('f32', ['hidden'], [7]);
    using weight = device.tensor('f32', ['hidden'], [8]);
    using halves = device.tensor('f16', ['token', 'hidden'], [3, 8]);
    using integers = device.tensor('i32', ['hidden'], [8]);
    using foreign = open().tensor('f32', ['hidden'], [8]);
    const good = { input: rows, weight, output: rows, epsilon: 1e-5 };
    expect(() => rmsNorm(stream, { ...good, weight: narrow })).toThrow(ShapeError);
    expect(() => rmsNorm(stream, { ...good, output: rows.slice('token', 0, 2) })).toThrow(ShapeError);
    expect(() => rmsNorm(stream, { ...good, output: halves as never })).toThrow(DTypeError);
    expect(() => rmsNorm(stream, { ...good, weight: integers as never })).toThrow(DTypeError);
    expect(() => rmsNorm(stream, { ...good, weight: foreign })).toThrow(DeviceError);
    expect(() => rmsNorm(stream, { ...good, epsilon: 0 })).toThrow(InvalidValueError);
  });
});
