import { expect, it } from 'vitest';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import type { FloatDType } from '../dtype.js';
import { decode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { rope } from './rope.js';
import { type RopeConvention, ropeDescription } from './rope-description.js';

interface OracleCase {
  readonly head: Float64Array;
  readonly position: number;
  readonly frequencies: Float32Array;
  readonly convention: RopeConvention;
  readonly scale: number;
}

/** One head, and how far each value of it may be off. */
function oracle({ head, position, frequencies, convention, scale }: OracleCase) {
  const pairs = frequencies.length;
  const expected = head.slice();
  const magnitude = new Float64Array(head.length);
  frequencies.forEach((frequency, pair) => {
    const [first, second] = convention === 'halfSplit' ? [pair, pair + pairs] : [2 * pair, 2 * pair + 1];
    const [a, b] = [head[first] ?? NaN, head[second] ?? NaN];
    const [cosine, sine] = [Math.cos(position * frequency) * scale, Math.sin(position * frequency) * scale];
    expected[first] = a * cosine - b * sine;
    expected[second] = b * cosine + a * sine;
    magnitude[first] = magnitude[second] = (Math.abs(a) + Math.abs(b)) * Math.abs(scale);
  });
  return { expected, magnitude };
}

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];
const axes = ['token', 'queryHead', 'dim'] as const;

describeOnDevices('rope', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('matches the float64 oracle over random shapes and dtypes, to a million positions', async () => {
    const random = new Random(3);
    for (let round = 0; round < 80; round++) {
      const [tokens, heads, dim] = [random.integer(1, 6), random.integer(1, 5), random.integer(2, 150)];
      const pairs = random.pick([Math.floor(dim / 2), random.integer(1, Math.floor(dim / 2))]);
      const dtype = random.pick(floats);
      const convention = random.pick(['halfSplit', 'interleaved'] as const);
      const scale = random.pick([1, 1, 0.7, 1.3]);
      const description = ropeDescription({
        theta: random.pick([100, 10_000, 500_000]),
        headDim: dim,
        rotaryDim: 2 * pairs,
        convention,
      });
      const frequencies = description.inverseFrequencies;
      const positions = Int32Array.from({ length: tokens }, () =>
        random.integer(0, random.pick([10, 3000, 1_000_000])),
      );
      const data = random.elements(dtype, tokens * (heads + 2) * dim);
      using positionTensor = device.tensor('i32', ['token'], [tokens], positions);
      using frequencyTensor = device.tensor('f32', ['pair'], [pairs], frequencies);
      using storage = device.tensor(dtype, axes, [tokens, heads + 2, dim], data);
      using separate = device.tensor(dtype, axes, [tokens, heads, dim]);
      const input = storage.slice('queryHead', 1, heads + 1);
      const output = random.pick([input, separate]);
      rope(stream, {
        input,
        positions: positionTensor,
        inverseFrequencies: frequencyTensor,
        output,
        convention,
        attentionScale: scale,
      });
      const actual = decode(dtype, await output.read());
      const values = decode(dtype, data);
      for (let token = 0; token < tokens; token++) {
        for (let head = 0; head < heads; head++) {
          const at = (token * (heads + 2) + head + 1) * dim;
          const position = positions[token] ?? NaN;
          const row = { head: values.subarray(at, at + dim), position, frequencies, convention, scale };
          const { expected, magnitude } = oracle(row);
          expected.forEach((wanted, index) => {
            // In units of 2^-24 (|a| + |b|): 3 for a cosine or sine (the rounded angle, its polynomial and
            // that one's last sum), 2 for the scale and its product, 2 for a product and the sum of the
            // rotation; 8 covers their second order. Dims that do not turn are copied without an error.
            const bound = (magnitude[index] ?? NaN) * 8 * unitRoundoff.f32;
            const stored =
              bound === 0 ? 0 : bound + (Math.abs(wanted) + bound) * unitRoundoff[dtype] + 2 ** -25;
            const difference = Math.abs((actual[(token * heads + head) * dim + index] ?? NaN) - wanted);
            expect(difference).toBeLessThanOrEqual(stored);
          });
        }
      }
    }
  });

  it('depends on the distance of two positions only: the score of a rotated query and key', async () => {
    const dim = 64;
    const random = new Random(4);
    const [query, key] = [random.elements('f32', dim), random.elements('f32', dim)];
    const { inverseFrequencies, convention } = ropeDescription({ theta: 10_000, headDim: dim });
    using frequencies = device.tensor('f32', ['pair'], [dim / 2], inverseFrequencies);
    const score = async (queryPosition: number, keyPosition: number): Promise<number> => {
      const rows = Float32Array.of(...query, ...key);
      using pair = device.tensor('f32', axes, [2, 1, dim], rows);
      using positions = device.tensor('i32', ['token'], [2], Int32Array.of(queryPosition, keyPosition));
      rope(stream, { input: pair, positions, inverseFrequencies: frequencies, output: pair, convention });
      const turned = await pair.read();
      return turned.subarray(0, dim).reduce((sum, x, index) => sum + x * (turned[dim + index] ?? NaN), 0);
    };
    const near = await score(17, 5);
    const far = await score(999_965, 999_953);
    const norms = query.reduce((sum, x, index) => sum + Math.abs(x) + Math.abs(key[index] ?? NaN), 0);
    const largest = Math.max(...query.map(Math.abs), ...key.map(Math.abs));
    // Each rotated value is off by at most 8 * 2^-24 (|a| + |b|) and meets one no larger than |a| + |b|.
    expect(Math.abs(near - far)).toBeLessThanOrEqual(2 * 2 * 8 * unitRoundoff.f32 * norms * 2 * largest);
    expect(Math.abs((await score(17, 6)) - near)).toBeGreaterThan(0.01);
  });

  it('gives a token the same result whatever its neighbours and the threads', async () => {
    const data = new Random(5).elements('f32', 40 * 3 * 48);
    const positions = Int32Array.from({ length: 40 }, (_, token) => token * 977);
    const { inverseFrequencies, convention } = ropeDescription({ theta: 10_000, headDim: 48 });
    const run = async (threads: number, start: number, end: number) => {
      const other = open(threads);
      using rows = other.tensor('f32', axes, [40, 3, 48], data);
      using positionTensor = other.tensor('i32', ['token'], [40], positions);
      using frequencies = other.tensor('f32', ['pair'], [24], inverseFrequencies);
      const part = rows.slice('token', start, end);
      rope(other.defaultStream, {
        input: part,
        positions: positionTensor.slice('token', start, end),
        inverseFrequencies: frequencies,
        output: part,
        convention,
      });
      return await part.read(other.defaultStream);
    };
    const whole = await run(1, 0, 40);
    expect(await run(3, 0, 40)).toEqual(whole);
    expect(await run(2, 7, 8)).toEqual(whole.slice(7 * 144, 8 * 144));
  });

  it('refuses bad input with a typed error', () => {
    using rows = device.tensor('f32', axes, [3, 2, 8]);
    using positions = device.tensor('i32', ['token'], [3]);
    using inverseFrequencies = device.tensor('f32', ['pair'], [4]);
    using tooMany = device.tensor('f32', ['pair'], [5]);
    using unsigned = device.tensor('u32', ['token'], [3]);
    using halves = device.tensor('f16', axes, [3, 2, 8]);
    using foreign = open().tensor('i32', ['token'], [3]);
    const good = {
      input: rows,
      positions,
      inverseFrequencies,
      output: rows,
      convention: 'halfSplit' as const,
    };
    expect(() => rope(stream, { ...good, positions: positions.slice('token', 0, 2) })).toThrow(ShapeError);
    expect(() => rope(stream, { ...good, inverseFrequencies: tooMany })).toThrow(ShapeError);
    expect(() => rope(stream, { ...good, output: rows.slice('token', 0, 2) })).toThrow(ShapeError);
    const short = rows.slice('dim', 0, 7);
    expect(() => rope(stream, { ...good, input: short, output: short })).toThrow(ShapeError);
    expect(() => rope(stream, { ...good, output: halves as never })).toThrow(DTypeError);
    expect(() => rope(stream, { ...good, positions: unsigned as never })).toThrow(DTypeError);
    expect(() => rope(stream, { ...good, positions: foreign })).toThrow(DeviceError);
    expect(() => rope(stream, { ...good, convention: 'spiral' as never })).toThrow(InvalidValueError);
    expect(() => rope(stream, { ...good, attentionScale: NaN })).toThrow(InvalidValueError);
  });
});
