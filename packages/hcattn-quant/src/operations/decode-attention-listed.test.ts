import { type Device, DTypeError, DeviceError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { decodeAttentionListed } from './decode-attention-listed.js';
import { spoiltLists } from '../testing/spoilt-batches.js';

interface Sizes {
  readonly rows: number;
  readonly kvHeads: number;
  readonly group: number;
  readonly headDim: number;
  readonly chosen: number;
  readonly blocks: number;
  readonly query: FloatDType;
  readonly keys: FloatDType;
  readonly values: FloatDType | 'i8';
  readonly counts: readonly number[];
}

const small: Sizes = {
  ...{ rows: 2, kvHeads: 2, group: 3, headDim: 40, chosen: 70, blocks: 3 },
  ...{ query: 'f32', keys: 'f16', values: 'f16', counts: [70, 0, 1, 33] },
};

/** Random lists, keys and values, in memory of the host. */
async function lists(device: Device, random: Random, sizes: Sizes) {
  const { rows, kvHeads, group, headDim, chosen, blocks, counts } = sizes;
  const normals = (dtype: FloatDType, length: number) => encode(dtype, Float64Array.from({ length }, () => random.normal()));
  const elements = blocks * 64 * headDim;
  const isCoded = sizes.values === 'i8';
  const stored = {
    query: normals(sizes.query, rows * kvHeads * group * headDim),
    keys: normals(sizes.keys, elements),
    values: sizes.values === 'i8' ? Int8Array.from({ length: elements }, () => random.integer(-127, 127)) : normals(sizes.values, elements),
    valueScales: normals('bf16', blocks * 64),
    valueRows: Int32Array.from({ length: rows * kvHeads * chosen }, () => random.integer(0, blocks * 64 - 1)),
    counts: Int32Array.from(counts),
    output: new Float32Array(rows * kvHeads * group * headDim).fill(NaN),
    logSumExp: new Float32Array(rows * kvHeads * group),
  };
  const host = {
    query: await device.hostTensor(sizes.query, ['token', 'queryHead', 'dim'], [rows, kvHeads * group, headDim]),
    keys: await device.hostTensor(sizes.keys, ['valueBlock', 'blockToken', 'dim'], [blocks, 64, headDim]),
    values: await device.hostTensor(sizes.values, ['valueBlock', 'blockToken', 'dim'], [blocks, 64, headDim]),
    valueScales: isCoded ? await device.hostTensor('bf16', ['valueBlock', 'blockToken'], [blocks, 64]) : undefined,
    valueRows: await device.hostTensor('i32', ['token', 'kvHead', 'chosen'], [rows, kvHeads, chosen]),
    counts: await device.hostTensor('i32', ['token', 'kvHead'], [rows, kvHeads]),
    output: await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [rows, kvHeads * group, headDim]),
    logSumExp: await device.hostTensor('f32', ['token', 'queryHead'], [rows, kvHeads * group]),
    scale: headDim ** -0.5,
  };
  const stream = device.createStream();
  for (const name of ['query', 'keys', 'values', 'valueScales', 'valueRows', 'counts', 'output', 'logSumExp'] as const) {
    const tensor = host[name];
    if (tensor !== undefined) stream.write(tensor, stored[name]);
  }
  return { host, stored, stream };
}

async function attend(device: Device, random: Random, sizes: Sizes) {
  const { host, stream } = await lists(device, random, sizes);
  decodeAttentionListed(stream, host);
  return { output: await host.output.read(stream), logSumExp: await host.logSumExp.read(stream) };
}

async function checkAgainstOracle(device: Device, random: Random, sizes: Sizes) {
  const { host, stored, stream } = await lists(device, random, sizes);
  decodeAttentionListed(stream, host);
  const [output, logSumExp] = [await host.output.read(stream), await host.logSumExp.read(stream)];
  const { headDim, group, chosen, counts } = sizes;
  const [queries, keys, values] = [decode(sizes.query, stored.query), decode(sizes.keys, stored.keys), decode(sizes.values, stored.values)];
  const scales = sizes.values === 'i8' ? decode('bf16', stored.valueScales) : undefined;
  const u = unitRoundoff.f32;
  logSumExp.forEach((given, head) => {
    const list = Math.floor(head / group);
    const rows = stored.valueRows.subarray(list * chosen, list * chosen + (counts[list] ?? NaN));
    let error = 0; // of a score
    const scores = Array.from(rows, (row) => {
      let [score, size] = [0, 0];
      for (let dim = 0; dim < headDim; dim++) {
        const product = (queries[head * headDim + dim] ?? NaN) * (keys[row * headDim + dim] ?? NaN) * host.scale;
        score += product;
        size += Math.abs(product);
      }
      // Each product and sum is rounded, and the query when it is scaled by a rounded scale.
      error = Math.max(error, (headDim + 3) * u * size);
      return score;
    });
    const most = Math.max(...scores);
    const sum = scores.reduce((all, score) => all + Math.exp(score - most), 0);
    const exact = rows.length === 0 ? -Infinity : most + Math.log(sum);
    // Of an exponential: its score and the largest one, their difference, and itself, with 2 ulp. Then the sums of 256
    // rows and of as many, whose factors are exponentials too, and the division.
    const spread = Math.max(0, ...scores.map((score) => most - score));
    const ofWeight = 2 * error + (2 * spread + 16) * u;
    const roundings = (256 + Math.ceil(chosen / 256) + 4) * u;
    if (rows.length === 0) expect(given).toBe(-Infinity);
    else expect(Math.abs(given - exact)).toBeLessThanOrEqual(ofWeight + roundings + 2 * Math.abs(exact) * u);
    for (let dim = 0; dim < headDim; dim++) {
      let [result, size] = [0, 0];
      rows.forEach((row, i) => {
        const value = (values[row * headDim + dim] ?? NaN) * (scales?.[row] ?? 1) * Math.exp((scores[i] ?? NaN) - exact);
        result += value;
        size += Math.abs(value);
      });
      expect(Math.abs((output[head * headDim + dim] ?? NaN) - result)).toBeLessThanOrEqual(2 * (ofWeight + roundings) * size);
    }
  });
}

describeOnDevices('decodeAttentionListed', ({ open }) => {
  it('matches the float64 oracle over random sizes and dtypes', async () => {
    const device = open();
    const random = new Random(1);
    const floats = ['f32', 'f16', 'bf16'] as const;
    for (let round = 0; round < 16; round++) {
      const chosen = random.pick([1, 31, 64, 257, 900]);
      const [rows, kvHeads, group] = [random.integer(1, 2), random.integer(1, 3), random.integer(1, 9)];
      const counts = Array.from({ length: rows * kvHeads }, () => random.pick([0, 1, chosen, random.integer(0, chosen)]));
      const dtypes = { query: random.pick(floats), keys: random.pick(floats), values: random.pick([...floats, 'i8' as const]) };
      await checkAgainstOracle(device, random, {
        ...{ rows, kvHeads, group, chosen, blocks: 4, counts, headDim: random.pick([1, 7, 16, 40, 64, 128, 200]) },
        ...dtypes,
      });
    }
  });

  it('gives the same bits on 1, 2 and 16 threads, recorded and repeated', async () => {
    for (const values of ['f16', 'bf16', 'i8'] as const) {
      const sizes: Sizes = { ...small, values, chosen: 1500, headDim: 64, counts: [1500, 17, 0, 1025] };
      const results = [];
      for (const threads of [1, 2, 16]) {
        const device = open(threads);
        results.push(await attend(device, new Random(2), sizes));
        const { host, stream } = await lists(device, new Random(2), sizes);
        using recording = stream.record(() => {
          decodeAttentionListed(stream, host);
        });
        for (let round = 0; round < 3; round++) stream.replay(recording);
        results.push({ output: await host.output.read(stream), logSumExp: await host.logSumExp.read(stream) });
      }
      for (const result of results) expect(result).toEqual(results[0]);
    }
  });

  it('reads a key and a query that are not finite into the rows and heads that meet them', async () => {
    const device = open();
    for (const odd of [NaN, Infinity]) {
      const { host, stored, stream } = await lists(device, new Random(3), small);
      const { group, headDim, chosen } = small;
      const spoilt = stored.valueRows[0] ?? NaN;
      // With queries above 0 the score is plus infinity, or NaN.
      stream.write(host.query, stored.query.map(Math.abs));
      stream.write(host.keys, Uint16Array.from(stored.keys, (bits, index) => (index === spoilt * headDim ? (encode('f16', Float64Array.of(odd))[0] ?? 0) : bits)));
      decodeAttentionListed(stream, host);
      const [output, logSumExp] = [await host.output.read(stream), await host.logSumExp.read(stream)];
      logSumExp.forEach((x, head) => {
        const list = Math.floor(head / group);
        const rows = stored.valueRows.slice(list * chosen, list * chosen + (small.counts[list] ?? 0));
        const heads = output.subarray(head * headDim, (head + 1) * headDim);
        expect(Number.isNaN(x)).toBe(rows.includes(spoilt));
        expect(heads.every(Number.isNaN)).toBe(rows.includes(spoilt));
        if (!rows.includes(spoilt)) expect(heads.some(Number.isNaN)).toBe(false);
      });
    }
  });

  it('keeps a NaN of the choice in its row and head, also without tokens', async () => {
    const device = open();
    const { host, stored, stream } = await lists(device, new Random(4), small);
    const { group, headDim } = small;
    const odd = [1, group]; // of the first list, and of the second, which is empty
    stream.write(host.logSumExp, Float32Array.from(stored.logSumExp, (_, head) => (odd.includes(head) ? NaN : 3)));
    decodeAttentionListed(stream, host);
    const [output, logSumExp] = [await host.output.read(stream), await host.logSumExp.read(stream)];
    const sound = await attend(device, new Random(4), small);
    logSumExp.forEach((x, head) => {
      const own = output.subarray(head * headDim, (head + 1) * headDim);
      if (odd.includes(head)) {
        expect([x, ...own].every(Number.isNaN)).toBe(true);
      } else {
        expect(x).toBe(sound.logSumExp[head]);
        expect(own).toEqual(sound.output.subarray(head * headDim, (head + 1) * headDim));
      }
    });
  });

  it.each(spoiltLists)('rejects the wait for %s', async (_, name, number) => {
    const device = open();
    const { host, stored, stream } = await lists(device, new Random(5), small);
    stream.write(host[name], stored[name].fill(number, 0, 1));
    decodeAttentionListed(stream, host);
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const { host, stream } = await lists(device, new Random(6), small);
    expectRefusals(decodeAttentionListed, stream, host, [
      [{ output: await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [2, 5, 40]) }, ShapeError],
      [{ counts: await device.hostTensor('i32', ['token', 'kvHead'], [1, 2]) }, ShapeError],
      [{ keys: await device.hostTensor('f16', ['valueBlock', 'blockToken', 'dim'], [2, 64, 40]) }, ShapeError],
      [{ valueRows: await device.hostTensor('i32', ['token', 'kvHead', 'chosen'], [2, 4, 70]), counts: await device.hostTensor('i32', ['token', 'kvHead'], [2, 4]) }, ShapeError],
      [{ valueScales: await device.hostTensor('bf16', ['valueBlock', 'blockToken'], [3, 64]) }, DTypeError],
      [{ values: await device.hostTensor('i8', ['valueBlock', 'blockToken', 'dim'], [3, 64, 40]) }, DTypeError],
      [{ scale: NaN }, InvalidValueError],
      ...(device.kind === 'cuda' ? ([[{ query: device.tensor('f32', ['token', 'queryHead', 'dim'], [2, 6, 40]) }, DeviceError]] as const) : []),
    ]);
  });
});
