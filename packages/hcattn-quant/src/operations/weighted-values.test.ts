import { createDevice, type Device, DTypeError, DeviceError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { weightedValues } from './weighted-values.js';
import { spoiltLists } from '../testing/spoilt-batches.js';

type ValueDType = FloatDType | 'i8';

interface Sizes {
  readonly rows: number;
  readonly kvHeads: number;
  readonly group: number;
  readonly headDim: number;
  readonly chosen: number;
  readonly blocks: number;
  readonly dtype: ValueDType;
  readonly counts: readonly number[];
}

const small: Sizes = { rows: 2, kvHeads: 2, group: 3, headDim: 40, chosen: 70, blocks: 3, dtype: 'f16', counts: [70, 0, 1, 33] };

function valuesOf(random: Random, { dtype, blocks, headDim }: Sizes) {
  const length = blocks * 64 * headDim;
  if (dtype !== 'i8') return random.elements(dtype, length);
  return new Int8Array(length).map(() => random.integer(-127, 127));
}

/** Lists of random rows, in memory of the host. */
async function lists(device: Device, random: Random, sizes: Sizes) {
  const { rows, kvHeads, group, headDim, chosen, blocks, dtype, counts } = sizes;
  const stored = {
    valueRows: new Int32Array(rows * kvHeads * chosen).map(() => random.integer(0, blocks * 64 - 1)),
    weights: new Float32Array(rows * kvHeads * chosen * group).map(() => (random.next() < 0.3 ? 0 : random.next())),
    counts: Int32Array.from(counts),
    values: valuesOf(random, sizes),
  };
  const output = rows * kvHeads * group * headDim;
  const host = {
    valueRows: await device.hostTensor('i32', ['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
    weights: await device.hostTensor('f32', ['token', 'kvHead', 'chosen', 'groupHead'], [rows, kvHeads, chosen, group]),
    counts: await device.hostTensor('i32', ['token', 'kvHead'], [rows, kvHeads]),
    values: await device.hostTensor(dtype, ['valueBlock', 'blockToken', 'dim'], [blocks, 64, headDim]),
    output: await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [rows, kvHeads * group, headDim]),
  };
  const stream = device.createStream();
  for (const name of ['valueRows', 'weights', 'counts', 'values'] as const) stream.write(host[name], stored[name]);
  stream.write(host.output, new Float32Array(output).fill(NaN));
  return { host, stored, stream };
}

/** The same lists in the device's memory, with room on the host: all of it is spoilt before. */
function sent(device: Device, { host, stored, stream }: Awaited<ReturnType<typeof lists>>) {
  const onDevice = {
    valueRows: device.tensor('i32', host.valueRows.axes, host.valueRows.shape),
    weights: device.tensor('f32', host.weights.axes, host.weights.shape),
    counts: device.tensor('i32', host.counts.axes, host.counts.shape),
  };
  for (const name of ['valueRows', 'weights', 'counts'] as const) {
    stream.write(onDevice[name], stored[name]);
    stream.write(host[name], stored[name].slice().fill(-1));
  }
  return { ...host, ...onDevice, hostValueRows: host.valueRows, hostWeights: host.weights, hostCounts: host.counts };
}

async function sum(device: Device, random: Random, sizes: Sizes): Promise<Float32Array> {
  const { host, stream } = await lists(device, random, sizes);
  weightedValues(stream, host);
  return host.output.read(stream);
}

describeOnDevices('weightedValues', ({ open }) => {
  it('matches the float64 oracle over random sizes and dtypes', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 24; round++) {
      const chosen = random.pick([1, 31, 64, 600, 1500]);
      const [rows, kvHeads, group] = [random.integer(1, 3), random.integer(1, 3), random.integer(1, 9)];
      const counts = Array.from({ length: rows * kvHeads }, () => random.pick([0, 1, chosen, random.integer(0, chosen)]));
      const sizes = { rows, kvHeads, group, chosen, blocks: 4, counts, headDim: random.pick([1, 7, 16, 40, 64, 128, 200]), dtype: random.pick(['f32', 'f16', 'bf16', 'i8'] as const) };
      const { host, stored, stream } = await lists(device, random, sizes);
      weightedValues(stream, host);
      const output = await host.output.read(stream);
      const values = decode(sizes.dtype, stored.values);
      const { headDim } = sizes;
      for (let index = 0; index < output.length; index++) {
        const head = Math.floor(index / headDim);
        const list = Math.floor(head / group);
        let [exact, size] = [0, 0];
        for (let i = 0; i < (counts[list] ?? NaN); i++) {
          const weight = stored.weights[(list * chosen + i) * group + (head % group)] ?? NaN;
          const product = weight * (values[(stored.valueRows[list * chosen + i] ?? NaN) * headDim + (index % headDim)] ?? NaN);
          exact += product;
          size += Math.abs(product);
        }
        // A product and its additions: within 512 rows, and of the sums of 512.
        const roundings = 1 + 512 + Math.ceil(chosen / 512);
        const isNear = Math.abs((output[index] ?? NaN) - exact) <= roundings * unitRoundoff.f32 * size;
        if (!isNear) expect.fail(`round ${round}, element ${index}: ${output[index]}, not ${exact}`);
      }
    }
  });

  it('gives the same bits on 1, 2 and 16 threads, recorded and repeated', async () => {
    for (const dtype of ['f16', 'bf16', 'i8'] as const) {
      const sizes = { ...small, dtype, chosen: 3000, headDim: 64, counts: [3000, 17, 0, 2049] };
      const results = [];
      for (const threads of [1, 2, 16]) {
        const device = open(threads);
        results.push(await sum(device, new Random(2), sizes));
        const { host, stream } = await lists(device, new Random(2), sizes);
        using recording = stream.record(() => {
          weightedValues(stream, host);
        });
        for (let round = 0; round < 4; round++) stream.replay(recording);
        results.push(await host.output.read(stream));
      }
      for (const result of results) expect(result).toEqual(results[0]);
    }
  });

  /** Of lists as long as these a GPU sums the last pieces itself. */
  const long: Sizes = { ...small, chosen: 20000, counts: [20000, 12288, 12287, 11776] };

  it('sums long lists with the bits that one thread of a CPU gives, recorded or not', async () => {
    for (const dtype of ['f32', 'f16', 'bf16', 'i8'] as const) {
      for (const [group, headDim] of [[1, 40], [2, 64], [4, 128], [8, 200], [3, 24], [4, 6]] as const) {
        const sizes = { ...long, dtype, group, headDim };
        const device = open();
        const alone = device.kind === 'cpu' ? open(1) : createDevice({ kind: 'cpu', threads: 1 });
        const expected = await sum(alone, new Random(7), sizes);
        expect(expected.every(Number.isFinite)).toBe(true);
        const { host, stream } = await lists(device, new Random(7), sizes);
        weightedValues(stream, host);
        expect(await host.output.read(stream)).toEqual(expected);
        stream.write(host.output, new Float32Array(expected.length).fill(NaN));
        using recording = stream.record(() => {
          weightedValues(stream, host);
        });
        for (let round = 0; round < 3; round++) stream.replay(recording);
        expect(await host.output.read(stream)).toEqual(expected);
      }
    }
  });

  it('sums lists in the memory of a GPU with the same bits, recorded or not', async () => {
    for (const sizes of [{ ...long, group: 4, headDim: 128 }, { ...long, group: 3, headDim: 24 }, { ...small, group: 4 }, small]) {
      const device = open();
      const expected = await sum(device, new Random(9), sizes);
      const given = await lists(device, new Random(9), sizes);
      const { stream } = given;
      const args = sent(device, given);
      weightedValues(stream, args);
      expect(await args.output.read(stream)).toEqual(expected);
      stream.write(args.output, new Float32Array(expected.length).fill(NaN));
      using recording = stream.record(() => {
        weightedValues(stream, args);
      });
      for (let round = 0; round < 3; round++) stream.replay(recording);
      expect(await args.output.read(stream)).toEqual(expected);
    }
  });

  it('rejects the wait for a row behind the pool at the end of a long list', async () => {
    const { host, stored, stream } = await lists(open(), new Random(8), { ...long, group: 4 });
    stored.valueRows[19999] = 192;
    stream.write(host.valueRows, stored.valueRows);
    weightedValues(stream, host);
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('gives zeros without tokens, and shows NaN where a list names it', async () => {
    const device = open();
    const { host, stored, stream } = await lists(device, new Random(3), small);
    const spoilt = stored.valueRows[0] ?? NaN;
    const values = stored.values as Uint16Array;
    values[spoilt * small.headDim + 5] = 0x7e00;
    stream.write(host.values, values);
    stream.write(host.weights, new Float32Array(stored.weights.length).fill(1));
    weightedValues(stream, host);
    const output = await host.output.read(stream);
    const { group, headDim, chosen } = small;
    const names = (list: number) => stored.valueRows.slice(list * chosen, list * chosen + (small.counts[list] ?? 0)).includes(spoilt);
    output.forEach((x, index) => {
      const list = Math.floor(index / headDim / group);
      expect(Number.isNaN(x)).toBe(index % headDim === 5 && names(list));
      if (list === 1) expect(x).toBe(0);
    });
  });

  it.each(spoiltLists)('rejects the wait for %s', async (_, name, number) => {
    const device = open();
    const { host, stored, stream } = await lists(device, new Random(4), small);
    stream.write(host[name], stored[name].fill(number, 0, 1));
    weightedValues(stream, host);
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
    const others = await lists(device, new Random(4), small);
    others.stored[name].fill(number, 0, 1);
    weightedValues(others.stream, sent(device, others));
    await expect(others.stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('leaves nothing behind when streams end and devices go amid sums', async () => {
    const sizes = { ...small, chosen: 20000, counts: [20000, 20000, 20000, 20000] };
    for (let round = 0; round < 5; round++) {
      const device = open(3);
      const { host, stream } = await lists(device, new Random(5), sizes);
      await stream.synchronize();
      for (let i = 0; i < 10; i++) weightedValues(stream, host);
      const waits = stream.synchronize().catch((error: unknown) => error);
      stream.dispose();
      for (const tensor of Object.values(host)) tensor.dispose();
      const end = (await waits) as object | undefined;
      expect([undefined, DeviceError]).toContain(end?.constructor);
      expect(device.memory().live).toBe(0);
    }
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const { host, stored, stream } = await lists(device, new Random(6), small);
    const { valueRows, weights, counts } = sent(device, { host, stored, stream });
    expectRefusals(weightedValues, stream, host, [
      [{ output: await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [2, 5, 40]) }, ShapeError],
      [{ output: await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [2, 6, 41]) }, ShapeError],
      [{ counts: await device.hostTensor('i32', ['token', 'kvHead'], [1, 2]) }, ShapeError],
      [{ weights: host.valueRows }, DTypeError],
      [{ hostCounts: host.counts }, InvalidValueError],
      ...(device.kind === 'cuda'
        ? ([
            [{ output: device.tensor('f32', ['token', 'queryHead', 'dim'], [2, 6, 40]) }, DeviceError],
            [{ valueRows, weights, counts }, DeviceError],
            [{ hostValueRows: valueRows, hostWeights: weights, hostCounts: counts }, DeviceError],
          ] as const)
        : []),
    ]);
  });
});
