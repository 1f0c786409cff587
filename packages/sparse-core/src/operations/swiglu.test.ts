import { expect, it } from 'vitest';
import { DeviceError, DTypeError, ShapeError } from '../errors.js';
import type { FloatDType } from '../dtype.js';
import { decode, encode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { swiglu } from './swiglu.js';

function oracle(gate: number, up: number): number {
  return (gate / (1 + Math.exp(-gate))) * up;
}

/**
 * In f32: the exponential is off by at most 2 roundings, which count once where it is a factor and once more
 * in 1 + e; that sum, the quotient and the three products round once each. Below -87.3 the exponential is
 * taken for 0, where silu is less than 2^-119. Then the result rounds to its dtype, halves to steps of 2^-24
 * at the least.
 */
function tolerance(wanted: number, up: number, dtype: FloatDType): number {
  const relative = 9 * unitRoundoff.f32 + unitRoundoff[dtype];
  return relative * Math.abs(wanted) + 2 ** -119 * Math.abs(up) + (dtype === 'f16' ? 2 ** -25 : 0);
}

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];
const axes = ['token', 'feature'] as const;

describeOnDevices('swiglu', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('matches the float64 oracle over random shapes, packed rows and dtypes', async () => {
    const random = new Random(6);
    for (let round = 0; round < 60; round++) {
      const tokens = random.pick([1, 2, 5, 70]);
      const features = random.pick(tokens < 70 ? [1, 7, 64, 333, 2048, 5000] : [7, 64, 333, 520]);
      const dtype = random.pick(floats);
      const data = random.elements(dtype, tokens * 2 * features, random.pick([0.1, 3, 60]));
      using packed = device.tensor(dtype, axes, [tokens, 2 * features], data);
      using separate = device.tensor(dtype, axes, [tokens, features]);
      const gate = packed.slice('feature', 0, features);
      const up = packed.slice('feature', features, 2 * features);
      const output = random.pick([gate, up, separate]);
      swiglu(stream, { gate, up, output });
      const actual = decode(dtype, await output.read());
      const values = decode(dtype, data);
      const wrong = Array.from(actual, (value, index) => {
        const at = Math.floor(index / features) * 2 * features + (index % features);
        const [g, u] = [values[at] ?? NaN, values[at + features] ?? NaN];
        const wanted = oracle(g, u);
        return { value, wanted, g, u, holds: Math.abs(value - wanted) <= tolerance(wanted, u, dtype) };
      }).filter(({ holds }) => !holds);
      expect(wrong).toEqual([]);
    }
  });

  it('holds from one end of f32 to the other', async () => {
    const gates = [0, -0, 1e-30, -1e-30, 20, -20, 87, -87, 87.4, -87.4, 89, -89, 200, -200, 3e38, -3e38];
    const gate = encode('f32', gates);
    using gateTensor = device.tensor('f32', axes, [1, gates.length], gate);
    using up = device.tensor('f32', axes, [1, gates.length], new Float32Array(gates.length).fill(1));
    using output = device.tensor('f32', axes, [1, gates.length]);
    swiglu(stream, { gate: gateTensor, up, output });
    (await output.read()).forEach((value, index) => {
      const wanted = oracle(gate[index] ?? NaN, 1);
      expect(Math.abs(value - wanted)).toBeLessThanOrEqual(tolerance(wanted, 1, 'f32'));
    });
  });

  it('keeps NaN, so that a broken activation shows', async () => {
    using gate = device.tensor('f32', axes, [1, 3], Float32Array.of(NaN, 1, 1));
    using up = device.tensor('f32', axes, [1, 3], Float32Array.of(1, NaN, 0));
    swiglu(stream, { gate, up, output: gate });
    expect(await gate.read()).toEqual(Float32Array.of(NaN, NaN, 0));
  });

  it('refuses bad input with a typed error', () => {
    using gate = device.tensor('f32', axes, [3, 8]);
    using halves = device.tensor('f16', axes, [3, 8]);
    using integers = device.tensor('i32', axes, [3, 8]);
    using narrow = device.tensor('f32', axes, [3, 7]);
    using foreign = open().tensor('f32', axes, [3, 8]);
    const good = { gate, up: gate, output: gate };
    expect(() => swiglu(stream, { ...good, up: narrow })).toThrow(ShapeError);
    expect(() => swiglu(stream, { ...good, output: gate.slice('token', 0, 2) })).toThrow(ShapeError);
    expect(() => swiglu(stream, { ...good, output: halves as never })).toThrow(DTypeError);
    expect(() => swiglu(stream, { gate: integers, up: integers, output: integers } as never)).toThrow(
      DTypeError,
    );
    expect(() => swiglu(stream, { ...good, up: foreign })).toThrow(DeviceError);
  });
});
