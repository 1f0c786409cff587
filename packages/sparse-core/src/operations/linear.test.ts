import { expect, it } from 'vitest';
import type { FloatDType } from '../dtype.js';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import { decode, encode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { linear } from './linear.js';
import { rmsNorm } from './rms-norm.js';
import { swiglu } from './swiglu.js';

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];

interface Sizes {
  readonly tokens: number;
  readonly inputs: number;
  readonly outputs: number;
}

/** The layer in float64, and beside each value the sum of its terms' magnitudes. */
function oracle(
  { tokens, inputs, outputs }: Sizes,
  input: Float64Array,
  weight: Float64Array,
  bias?: Float64Array,
  before?: Float64Array,
) {
  const value = new Float64Array(tokens * outputs);
  const magnitude = new Float64Array(tokens * outputs);
  for (let index = 0; index < value.length; index++) {
    const [token, output] = [Math.floor(index / outputs), index % outputs];
    const terms = [bias?.[output] ?? 0, before?.[index] ?? 0];
    for (let i = 0; i < inputs; i++) {
      terms.push((input[token * inputs + i] ?? NaN) * (weight[output * inputs + i] ?? NaN));
    }
    value[index] = terms.reduce((sum, term) => sum + term, 0);
    magnitude[index] = terms.reduce((sum, term) => sum + Math.abs(term), 0);
  }
  return { value, magnitude };
}

describeOnDevices('linear', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('matches the float64 oracle over random shapes, strides and dtypes', async () => {
    const random = new Random(1);
    for (let round = 0; round < 60; round++) {
      const tokens = random.pick([1, 2, 3, 8, 13, 17, 40]);
      const sizes: Sizes = { tokens, inputs: random.integer(1, 130), outputs: random.integer(1, 90) };
      const { inputs, outputs } = sizes;
      const [dtype, weightDType, biasDType] = [random.pick(floats), random.pick(floats), random.pick(floats)];
      const input = random.elements(dtype, tokens * inputs);
      const weight = random.elements(weightDType, (outputs + 1) * inputs);
      const bias = random.next() < 0.5 ? random.elements(biasDType, outputs) : undefined;
      const before = random.elements(dtype, (tokens + 2) * outputs);
      const accumulate = random.next() < 0.5;

      using inputTensor = device.tensor(dtype, ['token', 'in'], [tokens, inputs], input);
      using weightTensor = device.tensor(weightDType, ['out', 'in'], [outputs + 1, inputs], weight);
      using biasTensor = bias && device.tensor(biasDType, ['out'], [outputs], bias);
      using outputTensor = device.tensor(dtype, ['token', 'out'], [tokens + 2, outputs], before);
      linear(stream, {
        input: inputTensor,
        weight: weightTensor.slice('out', 1, outputs + 1),
        bias: biasTensor,
        output: outputTensor.slice('token', 1, tokens + 1),
        accumulate,
      });

      const [first, last] = [outputs, (tokens + 1) * outputs];
      const old = decode(dtype, before);
      const expected = oracle(
        sizes,
        decode(dtype, input),
        decode(weightDType, weight).subarray(inputs),
        bias && decode(biasDType, bias),
        accumulate ? old.subarray(first, last) : undefined,
      );
      const actual = decode(dtype, await outputTensor.read());
      // A sum of n terms in f32, in any order, is off by at most n u / (1 - n u) of the terms' magnitudes (Higham
      // 2002, 3.1); then the rounding to the output's dtype, whose smallest step is at most 2^-24.
      const summing = ((inputs + 2) * unitRoundoff.f32) / (1 - (inputs + 2) * unitRoundoff.f32);
      const wrong = Array.from(actual.subarray(first, last), (value, index) => {
        const [wanted, magnitude] = [expected.value[index] ?? NaN, expected.magnitude[index] ?? NaN];
        const computed = summing * magnitude;
        const stored = dtype === 'f32' ? 0 : unitRoundoff[dtype] * (Math.abs(wanted) + computed) + 2 ** -25;
        return { value, wanted, holds: Math.abs(value - wanted) <= computed + stored };
      }).filter(({ holds }) => !holds);
      expect(wrong).toEqual([]);
      // The rows beside the slice are as they were.
      expect(actual.subarray(0, first)).toEqual(old.subarray(0, first));
      expect(actual.subarray(last)).toEqual(old.subarray(last));
    }
  });

  it('is exact on small integers, which no order of summation rounds', async () => {
    const random = new Random(2);
    const sizes: Sizes = { tokens: 70, inputs: 320, outputs: 127 };
    const { tokens, inputs, outputs } = sizes;
    const integers = (count: number) => Float64Array.from({ length: count }, () => random.integer(-4, 4));
    const [input, weight] = [integers(tokens * inputs), integers(outputs * inputs)];
    const expected = oracle(sizes, input, weight).value;
    using inputTensor = device.tensor('f32', ['token', 'in'], [tokens, inputs], encode('f32', input));
    using outputTensor = device.tensor('f32', ['token', 'out'], [tokens, outputs]);
    for (const dtype of floats) {
      using weightTensor = device.tensor(dtype, ['out', 'in'], [outputs, inputs], encode(dtype, weight));
      linear(stream, { input: inputTensor, weight: weightTensor, output: outputTensor });
      expect(Float64Array.from(await outputTensor.read())).toEqual(expected);
    }
  });

  it('takes 1 to 256 rows', async () => {
    const random = new Random(14);
    const sizes: Sizes = { tokens: 256, inputs: 128, outputs: 72 };
    const { tokens, inputs, outputs } = sizes;
    // Sums of up to 128 ones are exact in every dtype.
    const ones = (count: number) => Float64Array.from({ length: count }, () => random.integer(-1, 1));
    const [input, weight] = [ones(tokens * inputs), ones(outputs * inputs)];
    const expected = oracle(sizes, input, weight).value;
    for (const [dtype, weightDType] of [['f32', 'f16'], ['f32', 'bf16'], ['f16', 'f16'], ['bf16', 'bf16']] as const) {
      using inputTensor = device.tensor(dtype, ['token', 'in'], [tokens, inputs], encode(dtype, input));
      using weightTensor = device.tensor(weightDType, ['out', 'in'], [outputs, inputs], encode(weightDType, weight));
      const wanted = Buffer.from(encode(dtype, expected).buffer);
      const wrong: number[] = [];
      for (let rows = 1; rows <= tokens; rows += rows % 16 === 1 ? 5 : 1) {
        using outputTensor = device.tensor(dtype, ['token', 'out'], [rows, outputs]);
        linear(stream, { input: inputTensor.slice('token', 0, rows), weight: weightTensor, output: outputTensor });
        const actual = Buffer.from((await outputTensor.read()).buffer);
        if (!actual.equals(wanted.subarray(0, actual.length))) wrong.push(rows);
      }
      expect(wrong).toEqual([]);
    }
  });

  it('shows infinities and NaN in the outputs that they reach, and in no other', async () => {
    const random = new Random(15);
    const [inputs, outputs] = [128, 72];
    for (const [dtype, weightDType] of [['f32', 'f16'], ['f32', 'bf16'], ['f16', 'f16'], ['bf16', 'bf16'], ['f32', 'f32']] as const) {
      for (const tokens of [5, 13, 40, 100, 200]) {
        const multiply = async (inputNumbers: Float64Array, weightNumbers: Float64Array) => {
          using input = device.tensor(dtype, ['token', 'in'], [tokens, inputs], encode(dtype, inputNumbers));
          using weight = device.tensor(weightDType, ['out', 'in'], [outputs, inputs], encode(weightDType, weightNumbers));
          using output = device.tensor(dtype, ['token', 'out'], [tokens, outputs]);
          linear(stream, { input, weight, output });
          return decode(dtype, await output.read());
        };
        const input = decode(dtype, random.elements(dtype, tokens * inputs));
        const weight = decode(weightDType, random.elements(weightDType, outputs * inputs));
        const wanted = await multiply(input, weight);
        input[2 * inputs + 5] = NaN;
        input[4 * inputs + 6] = Infinity;
        weight[7 * inputs + 8] = -Infinity;
        weight[71 * inputs + 127] = NaN;
        const reached = (index: number) => [2, 4].includes(Math.floor(index / outputs)) || [7, 71].includes(index % outputs);
        const wrong = (await multiply(input, weight)).filter((got, index) => (reached(index) ? Number.isFinite(got) : got !== wanted[index]));
        expect(wrong).toHaveLength(0);
      }
    }
  });

  it('reads weights as what was enqueued before it leaves them', async () => {
    const random = new Random(9);
    const [outputs, inputs] = [768, 512];
    const elements = (count: number) => random.elements('f16', count);
    using gain = device.tensor('f16', ['in'], [inputs], elements(inputs));
    using weight = device.tensor('f16', ['out', 'in'], [outputs, inputs]);
    for (const tokens of [1, 40]) {
      using input = device.tensor('f16', ['token', 'in'], [tokens, inputs], elements(tokens * inputs));
      using other = device.tensor('f16', ['token', 'in'], [tokens, inputs]);
      using output = device.tensor('f16', ['token', 'out'], [tokens, outputs]);
      using recording = stream.record(() => {
        // Between the weights' writer and their reader, as in a model, is a short operation.
        rmsNorm(stream, { input, weight: gain, output: other, epsilon: 1e-5 });
        linear(stream, { input, weight, output });
      });
      for (let round = 0; round < 3; round++) {
        using source = device.tensor('f16', ['out', 'in'], [outputs, inputs], elements(outputs * inputs));
        await source.read();
        rmsNorm(stream, { input: source, weight: gain, output: weight, epsilon: 1e-5 });
        stream.replay(recording);
        const written = await output.read();
        using atRest = device.tensor('f16', ['out', 'in'], [outputs, inputs], await weight.read());
        linear(stream, { input, weight: atRest, output });
        expect(await output.read()).toEqual(written);
      }
    }
  });

  it('reads weights as copies leave them', async () => {
    const random = new Random(12);
    const [outputs, inputs] = [768, 512];
    const elements = (count: number) => random.elements('f16', count);
    const matrix = () => device.tensor('f16', ['out', 'in'], [outputs, inputs]);
    using gain = device.tensor('f16', ['in'], [inputs], elements(inputs));
    using weight = matrix();
    using source = matrix();
    for (const tokens of [1, 40]) {
      using input = device.tensor('f16', ['token', 'in'], [tokens, inputs], elements(tokens * inputs));
      using other = device.tensor('f16', ['token', 'in'], [tokens, inputs]);
      using output = device.tensor('f16', ['token', 'out'], [tokens, outputs]);
      const multiply = () => {
        rmsNorm(stream, { input, weight: gain, output: other, epsilon: 1e-5 });
        linear(stream, { input, weight, output });
      };
      using behind = stream.record(multiply);
      using copying = stream.record(() => {
        stream.copy(source, weight);
        multiply();
      });
      for (let round = 0; round < 3; round++) {
        for (const way of ['write', 'copy', 'record'] as const) {
          const contents = elements(outputs * inputs);
          // The kernel ahead of the copy reads the weights that it replaces.
          stream.replay(behind);
          stream.write(way === 'write' ? weight : source, contents);
          if (way === 'copy') stream.copy(source, weight);
          stream.replay(way === 'record' ? copying : behind);
          const copied = await output.read();
          using atRest = device.tensor('f16', ['out', 'in'], [outputs, inputs], contents);
          linear(stream, { input, weight: atRest, output });
          expect(await output.read()).toEqual(copied);
        }
      }
    }
  });

  it('gives a row the same bits alone and among a few', async () => {
    const random = new Random(4);
    const [tokens, inputs, outputs] = [8, 328, 100];
    for (const dtype of floats) {
      for (const weightDType of floats) {
        const weight = random.elements(weightDType, outputs * inputs);
        using inputTensor = device.tensor(dtype, ['token', 'in'], [tokens, inputs], random.elements(dtype, tokens * inputs));
        using weightTensor = device.tensor(weightDType, ['out', 'in'], [outputs, inputs], weight);
        using together = device.tensor(dtype, ['token', 'out'], [tokens, outputs]);
        using alone = device.tensor(dtype, ['token', 'out'], [tokens, outputs]);
        linear(stream, { input: inputTensor, weight: weightTensor, output: together });
        for (let row = 0; row < tokens; row++) {
          linear(stream, {
            input: inputTensor.slice('token', row, row + 1),
            weight: weightTensor,
            output: alone.slice('token', row, row + 1),
          });
        }
        expect(await alone.read()).toEqual(await together.read());
      }
    }
  });

  it('gives rows the same bits whether or not more follow them', async () => {
    const random = new Random(8);
    const [tokens, fewer, inputs, outputs] = [16, 9, 320, 100];
    for (const dtype of floats) {
      for (const weightDType of floats) {
        const weight = random.elements(weightDType, outputs * inputs);
        using input = device.tensor(dtype, ['token', 'in'], [tokens, inputs], random.elements(dtype, tokens * inputs));
        using weightTensor = device.tensor(weightDType, ['out', 'in'], [outputs, inputs], weight);
        using all = device.tensor(dtype, ['token', 'out'], [tokens, outputs]);
        using first = device.tensor(dtype, ['token', 'out'], [fewer, outputs]);
        linear(stream, { input, weight: weightTensor, output: all });
        linear(stream, { input: input.slice('token', 0, fewer), weight: weightTensor, output: first });
        expect((await all.read()).subarray(0, fewer * outputs)).toEqual(await first.read());
      }
    }
  });

  it('gives the rows that are wanted what they have without the others', async () => {
    const random = new Random(7);
    const [tokens, inputs, outputs] = [20, 1024, 70];
    // More rows are another kernel on CUDA, whose sums have another order: small integers have none.
    const integers = (count: number) => Float64Array.from({ length: count }, () => random.integer(-4, 4));
    const elements = (count: number) =>
      device.kind === 'cpu' ? random.elements('f32', count) : encode('f32', integers(count));
    using input = device.tensor('f32', ['token', 'in'], [tokens, inputs], elements(tokens * inputs));
    using weight = device.tensor('f32', ['out', 'in'], [outputs, inputs], elements(outputs * inputs));
    using rows = device.tensor('i32', ['count'], [1]);
    for (const wanted of [0, 1, 3, 9, 17, 20, 30]) {
      stream.write(rows, Int32Array.of(wanted));
      using output = device.tensor('f32', ['token', 'out'], [tokens, outputs]);
      linear(stream, { input, weight, output, rows });
      const there = Math.min(wanted, tokens);
      if (there === 0) continue;
      using alone = device.tensor('f32', ['token', 'out'], [there, outputs]);
      linear(stream, { input: input.slice('token', 0, there), weight, output: alone });
      expect((await output.read()).subarray(0, there * outputs)).toEqual(await alone.read());
    }
    using two = device.tensor('i32', ['count'], [2]);
    using output = device.tensor('f32', ['token', 'out'], [tokens, outputs]);
    expect(() => linear(stream, { input, weight, output, rows: two })).toThrow(ShapeError);
    expect(() => linear(stream, { input, weight, output, rows: output as never })).toThrow(DTypeError);
    await stream.synchronize();
  });

  it('gives several layers of one input the results of one call each', async () => {
    const random = new Random(5);
    const inputs = 320;
    const outs = [96, 8, 0, 41, 200, 17];
    for (const dtype of floats) {
      for (const tokens of [1, 5, 20]) {
        using input = device.tensor(dtype, ['token', 'in'], [tokens, inputs], random.elements(dtype, tokens * inputs));
        const layers = outs.map((outputs, index) => {
          const weightDType = index === 1 ? 'f32' : random.pick(['f16', 'bf16'] as const);
          const before = random.elements(dtype, tokens * outputs);
          return {
            weight: device.tensor(weightDType, ['out', 'in'], [outputs, inputs], random.elements(weightDType, outputs * inputs)),
            bias: index % 2 === 0 ? undefined : device.tensor('f32', ['out'], [outputs], random.elements('f32', outputs)),
            output: device.tensor(dtype, ['token', 'out'], [tokens, outputs], before),
            alone: device.tensor(dtype, ['token', 'out'], [tokens, outputs], before),
          };
        });
        linear(stream, { input, layers, accumulate: true });
        for (const { weight, bias, output, alone } of layers) {
          linear(stream, { input, weight, bias, output: alone, accumulate: true });
          expect(await output.read()).toEqual(await alone.read());
          for (const tensor of [weight, bias, output, alone]) tensor?.dispose();
        }
      }
    }
  });

  it('multiplies by layers that lie behind one another', async () => {
    const random = new Random(13);
    const [inputs, outs] = [128, [48, 16, 16]];
    const outputs = 80;
    const integers = (count: number) => Float64Array.from({ length: count }, () => random.integer(-4, 4));
    for (const tokens of [3, 20, 70, 130]) {
      for (const biased of [false, true]) {
        const [input, weight, bias] = [integers(tokens * inputs), integers(outputs * inputs), integers(outputs)];
        using inputTensor = device.tensor('f16', ['token', 'in'], [tokens, inputs], encode('f16', input));
        using weights = device.tensor('f16', ['out', 'in'], [outputs, inputs], encode('f16', weight));
        using biases = device.tensor('f16', ['out'], [outputs], encode('f16', bias));
        using outputTensor = device.tensor('f16', ['token', 'out'], [tokens, outputs]);
        let first = 0;
        const layers = outs.map((count) => {
          const [start, end] = [first, (first += count)];
          return {
            weight: weights.slice('out', start, end),
            bias: biased ? biases.slice('out', start, end) : undefined,
            output: outputTensor.slice('out', start, end),
          };
        });
        linear(stream, { input: inputTensor, layers });
        const expected = oracle({ tokens, inputs, outputs }, input, weight, biased ? bias : undefined).value;
        // f16 holds these sums, which stay below 2048.
        expect(decode('f16', await outputTensor.read())).toEqual(Float64Array.from(expected));
      }
    }
  });

  it('gates one layer by another with the bits of swiglu behind both', async () => {
    const random = new Random(10);
    for (const dtype of floats) {
      for (const tokens of [1, 8, 13, 20, 33, 64, 70]) {
        const [inputs, outputs] = [random.pick([40, 64, 320]), random.pick([1, 40, 130, 300])];
        const packed = device.tensor(dtype, ['token', 'feature'], [tokens, 2 * outputs]);
        const layerOf = (first: number) => ({
          weight: device.tensor(dtype, ['out', 'in'], [outputs, inputs], random.elements(dtype, outputs * inputs)),
          bias: tokens % 2 === 0 ? device.tensor('f32', ['out'], [outputs], random.elements('f32', outputs)) : undefined,
          output: packed.slice('feature', first, first + outputs),
        });
        const layers = [layerOf(0), layerOf(outputs)] as const;
        using input = device.tensor(dtype, ['token', 'in'], [tokens, inputs], random.elements(dtype, tokens * inputs));
        using apart = device.tensor(dtype, ['token', 'feature'], [tokens, outputs]);
        linear(stream, { input, layers });
        const [{ output: gate }, { output: up }] = layers;
        swiglu(stream, { gate, up, output: apart });
        linear(stream, { input, layers, swiglu: true });
        expect(await gate.read()).toEqual(await apart.read());
        for (const { weight, bias } of layers) [weight, bias].forEach((tensor) => tensor?.dispose());
        packed.dispose();
      }
    }
  });

  it('gates the rows that are wanted', async () => {
    const random = new Random(11);
    const [tokens, inputs, outputs] = [6, 64, 24];
    using input = device.tensor('f32', ['token', 'in'], [tokens, inputs], random.elements('f32', tokens * inputs));
    using weights = device.tensor('f16', ['out', 'in'], [2 * outputs, inputs], random.elements('f16', 2 * outputs * inputs));
    using rows = device.tensor('i32', ['count'], [1], Int32Array.of(2));
    using all = device.tensor('f32', ['token', 'feature'], [tokens, 2 * outputs]);
    using some = device.tensor('f32', ['token', 'feature'], [tokens, 2 * outputs]);
    const layersOf = (output: typeof all) =>
      [0, outputs].map((first) => ({
        weight: weights.slice('out', first, first + outputs),
        output: output.slice('feature', first, first + outputs),
      }));
    linear(stream, { input, layers: layersOf(all), swiglu: true });
    linear(stream, { input, layers: layersOf(some), swiglu: true, rows });
    const gated = (output: typeof all) => output.slice('feature', 0, outputs).slice('token', 0, 2).read();
    expect(await gated(some)).toEqual(await gated(all));
  });

  it('refuses to gate what is not two layers of the same size', () => {
    using input = device.tensor('f32', ['token', 'in'], [3, 8]);
    using weights = device.tensor('f16', ['out', 'in'], [12, 8]);
    using outputs = device.tensor('f32', ['token', 'out'], [3, 12]);
    const layer = (start: number, end: number) => ({
      weight: weights.slice('out', start, end),
      output: outputs.slice('out', start, end),
    });
    const gate = layer(0, 4);
    expect(() => linear(stream, { input, layers: [gate], swiglu: true })).toThrow(InvalidValueError);
    expect(() => linear(stream, { input, layers: [gate, layer(4, 8), layer(8, 12)], swiglu: true })).toThrow(/two layers/);
    expect(() => linear(stream, { input, ...gate, swiglu: true })).toThrow(InvalidValueError);
    expect(() => linear(stream, { input, layers: [gate, layer(4, 9)], swiglu: true })).toThrow(ShapeError);
    expect(() => linear(stream, { input, layers: [gate, layer(4, 8)], swiglu: true, accumulate: true })).toThrow(/accumulate/);
    expect(() => linear(stream, { input, layers: [gate, layer(4, 8)], swiglu: 1 as never })).toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', () => {
    using input = device.tensor('f32', ['token', 'in'], [3, 8]);
    using weight = device.tensor('f16', ['out', 'in'], [5, 8]);
    using output = device.tensor('f32', ['token', 'out'], [3, 5]);
    using bias = device.tensor('bf16', ['out'], [5]);
    using narrow = device.tensor('f16', ['out', 'in'], [5, 7]);
    using short = device.tensor('f32', ['out'], [4]);
    using halves = device.tensor('f16', ['token', 'out'], [3, 5]);
    using integers = device.tensor('i32', ['out', 'in'], [5, 8]);
    using foreign = open().tensor('f16', ['out', 'in'], [5, 8]);
    const good = { input, weight, bias, output };
    expect(() => linear(stream, { ...good, weight: narrow })).toThrow(ShapeError);
    expect(() => linear(stream, { ...good, bias: short })).toThrow(ShapeError);
    expect(() => linear(stream, { ...good, output: output.slice('token', 0, 2) })).toThrow(ShapeError);
    expect(() => linear(stream, { ...good, output: output.slice('out', 0, 4) })).toThrow(ShapeError);
    expect(() => linear(stream, { ...good, output: halves as never })).toThrow(DTypeError);
    expect(() => linear(stream, { ...good, weight: integers as never })).toThrow(DTypeError);
    expect(() => linear(stream, { ...good, bias: integers as never })).toThrow(DTypeError);
    expect(() => linear(stream, { ...good, weight: foreign })).toThrow(DeviceError);
    const layers = [
      { weight, output },
      { weight: narrow, output },
    ];
    expect(() => linear(stream, { input, layers })).toThrow(ShapeError);
  });

  it('refuses outputs that overlap, and takes columns of one matrix', async () => {
    const random = new Random(6);
    const [tokens, inputs] = [3, 8];
    using input = device.tensor('f32', ['token', 'in'], [tokens, inputs], random.elements('f32', tokens * inputs));
    using weights = device.tensor('f32', ['out', 'in'], [8, inputs], random.elements('f32', 8 * inputs));
    using outputs = device.tensor('f32', ['token', 'out'], [tokens, 8]);
    const layer = (start: number, end: number) => ({
      weight: weights.slice('out', start, end),
      output: outputs.slice('out', start, end),
    });
    linear(stream, { input, layers: [layer(5, 8), layer(0, 2), layer(2, 5)] });
    using expected = device.tensor('f32', ['token', 'out'], [tokens, 8]);
    linear(stream, { input, weight: weights, output: expected });
    expect(await outputs.read()).toEqual(await expected.read());

    expect(() => linear(stream, { input, layers: [layer(0, 4), layer(3, 8)] })).toThrow(InvalidValueError);
    expect(() => linear(stream, { input, layers: [layer(3, 8), layer(0, 4)] })).toThrow(InvalidValueError);
    expect(() => linear(stream, { input, layers: [layer(0, 8), layer(0, 8)] })).toThrow(/another/);
    expect(() => linear(stream, { input, weight: weights, output: input.slice('in', 0, 8) })).toThrow(/the input/);
    const shared = new Float32Array(tokens * 8);
    const wraps = [0, 1].map(() => device.wrap('f32', ['token', 'out'], [tokens, 8], shared));
    const wrapped = wraps.map((output) => ({ weight: weights, output }));
    expect(() => linear(stream, { input, layers: wrapped })).toThrow(InvalidValueError);
  });
});
