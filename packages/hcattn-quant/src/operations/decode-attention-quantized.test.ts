import { CapabilityError, type Device, DTypeError, type FloatDType, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { attentionRow, decode, describeOnDevices, encode, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { type AttentionBits, blockTokens } from '../quantized-blocks.js';
import { rotated, rotationRun } from '../testing/quantized-oracle.js';
import { type QuantizedSizes, randomQuantizedCache } from '../testing/random-quantized-cache.js';
import { spoil, spoiltBatches } from '../testing/spoilt-batches.js';
import { decodeAttentionQuantized } from './decode-attention-quantized.js';

const axes = ['token', 'queryHead', 'dim'] as const;
const dtypes = ['f32', 'f16', 'bf16'] as const;
const bits = [8, 4] as const;

type Cache = ReturnType<typeof randomQuantizedCache<AttentionBits>>;

function randomSizes(random: Random, headDims: readonly number[]): QuantizedSizes {
  const kvHeads = random.integer(1, 3);
  const rows = Array.from({ length: random.integer(1, 3) }, () => random.pick([0, 1, 1, 1, 3]));
  return {
    rows,
    blocks: rows.map(() => Array.from({ length: kvHeads }, () => random.pick([0, 1, 4, 5, 9]))),
    kvHeads,
    group: random.integer(1, 9),
    headDim: random.pick(headDims),
    keyBits: random.pick(bits),
    valueBits: random.pick(bits),
  };
}

/** Outputs `[token, queryHead, dim]` and log-sum-exps, with NaN where nothing was written. */
async function attend(
  device: Device,
  random: Random,
  sizes: QuantizedSizes,
  cache: Cache,
  dtype: FloatDType,
  outputDType = dtype,
  before?: { readonly output: Float32Array; readonly logSumExp: Float32Array },
) {
  const { kvHeads, group, headDim } = sizes;
  const tokens = cache.starts.at(-1) ?? NaN;
  const shape = [tokens, kvHeads * group, headDim] as const;
  // One row and one head more than are used, so that strides are not those of the shape.
  const whole = [tokens + 1, kvHeads * group + 8, headDim] as const;
  const elements = random.elements(dtype, whole[0] * whole[1] * headDim);
  using wholeQuery = device.tensor(dtype, axes, whole, elements);
  using output = device.tensor(outputDType, axes, shape, before && encode(outputDType, before.output));
  const kept = before?.logSumExp ?? new Float32Array(tokens * shape[1]).fill(NaN);
  using logSumExp = device.tensor('f32', ['token', 'queryHead'], [tokens, shape[1]], kept);
  const query = wholeQuery.slice('token', 0, tokens).slice('queryHead', 0, shape[1]);
  const scale = headDim ** -0.5;
  decodeAttentionQuantized(device.createStream(), { ...cache.arguments, query, output, logSumExp, scale, merge: before !== undefined });
  const queries = decode(dtype, elements);
  return {
    output: decode(outputDType, await output.read()),
    logSumExp: await logSumExp.read(),
    query(token: number, head: number): Float64Array {
      const first = (token * whole[1] + head) * headDim;
      return queries.subarray(first, first + headDim);
    },
    scale,
  };
}

const norm = (row: Float64Array) => Math.hypot(...row);

async function checkAgainstOracle(device: Device, random: Random, sizes: QuantizedSizes, dtype: FloatDType, outputDType: FloatDType) {
  const cache = randomQuantizedCache(device, random, sizes);
  const { kvHeads, group, headDim } = sizes;
  const result = await attend(device, random, sizes, cache, dtype, outputDType);
  const tensorCores = device.kind === 'cuda' && dtype !== 'f32' && dtype === outputDType && [64, 128].includes(headDim);
  const queryHeads = kvHeads * group;
  sizes.rows.forEach((n, entry) => {
    const heads = Array.from({ length: kvHeads }, (_, kvHead) => {
      const count = (sizes.blocks[entry]?.[kvHead] ?? NaN) * blockTokens;
      const key = (token: number) => cache.key(entry, kvHead, token);
      const value = (token: number) => cache.value(entry, kvHead, token);
      let [largestKey, largestValue, keySum] = [0, 0, 0];
      for (let token = 0; token < count; token++) {
        largestKey = Math.max(largestKey, norm(key(token)));
        largestValue = Math.max(largestValue, norm(value(token)));
        keySum = Math.max(keySum, key(token).reduce((sum, x) => sum + Math.abs(x), 0));
      }
      return { count, key, value, largestKey, largestValue, keySum };
    });
    for (let index = 0; index < n * queryHeads; index++) {
      const at = (cache.starts[entry] ?? NaN) * queryHeads + index;
      const head = heads[Math.floor((index % queryHeads) / group)];
      if (head === undefined) throw new Error('a kv head is missing');
      const { count, largestKey, largestValue, keySum } = head;
      const query = rotated(result.query(Math.floor(at / queryHeads), at % queryHeads));
      const wanted = attentionRow(query, count, result.scale, head.key, head.value, tensorCores ? unitRoundoff.f16 : 0);
      // A rotation is log2 n additions, a sign and a product for each dim; its error is as long as the row, times these.
      const turns = (Math.log2(rotationRun(headDim)) + 2) * unitRoundoff.f32;
      // Tensor cores take queries in 16 bits of the largest of their dims.
      const query16 = tensorCores ? 2 ** -16 * Math.max(...query.map(Math.abs)) * keySum : 0;
      const scoreError = result.scale * (turns * norm(query) * largestKey + query16);
      // The error of a score counts twice in a weight, and that twice in a quotient. Values of a group of which the step
      // is below 2^-17 are not exact; there are none here.
      const outputError = wanted.outputError + (4 * scoreError + turns) * largestValue;
      const excess = wanted.output.map((exact, dim) => {
        const error = Math.abs((result.output[at * headDim + dim] ?? NaN) - exact);
        return error - (outputError + unitRoundoff[outputDType] * Math.abs(exact) + 2 ** -25);
      });
      expect(Math.max(...excess)).toBeLessThanOrEqual(0);
      const logSumExp = result.logSumExp[at] ?? NaN;
      if (count === 0) expect(logSumExp).toBe(-Infinity);
      else expect(Math.abs(logSumExp - wanted.logSumExp)).toBeLessThanOrEqual(wanted.logSumExpError + 2 * scoreError);
    }
  });
}

const small: QuantizedSizes = {
  rows: [1, 2],
  blocks: [
    [3, 9],
    [1, 0],
  ],
  kvHeads: 2,
  group: 3,
  headDim: 64,
  keyBits: 8,
  valueBits: 4,
};

describeOnDevices('decodeAttentionQuantized', ({ name, open }) => {
  it('matches the float64 oracle over random shapes, dtypes and bits', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 16; round++) {
      const sizes = randomSizes(random, [1, 7, 20, 32, 64, 80, 96, 128, 192, 256]);
      await checkAgainstOracle(device, random, sizes, random.pick(dtypes), random.pick(dtypes));
    }
  });

  it.each(bits.flatMap((keyBits) => bits.map((valueBits) => ({ keyBits, valueBits }))))(
    'matches it over the sizes that tensor cores take ($keyBits and $valueBits bits)',
    async ({ keyBits, valueBits }) => {
      const device = open();
      const random = new Random(2 * keyBits + valueBits);
      for (const headDim of [64, 128]) {
        for (const dtype of ['f16', 'bf16'] as const) {
          const sizes = { ...randomSizes(random, [headDim]), keyBits, valueBits };
          await checkAgainstOracle(device, random, sizes, dtype, dtype);
        }
      }
    },
  );

  it('gives the same bits on one thread and on three', async () => {
    const results = [];
    for (const threads of [1, 3]) {
      const device = open(threads);
      const cache = randomQuantizedCache(device, new Random(3), small);
      const { output, logSumExp } = await attend(device, new Random(4), small, cache, 'f32');
      results.push({ output, logSumExp });
    }
    expect(results[1]).toEqual(results[0]);
  });

  // On CUDA neighbours change where the keys of an entry are split.
  it.skipIf(name === 'cuda')('gives a sequence what it gets alone', async () => {
    const device = open();
    const cache = randomQuantizedCache(device, new Random(5), small);
    const { output } = await attend(device, new Random(6), small, cache, 'f16');
    const values = small.headDim * small.kvHeads * small.group;
    const alone = { ...cache, starts: Int32Array.of(0, 1) };
    const first = {
      ...alone,
      arguments: {
        ...cache.arguments,
        slots: device.tensor('i32', ['batch'], [1], Int32Array.of(1)),
        queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 1)),
      },
    };
    expect((await attend(device, new Random(6), small, first, 'f16')).output).toEqual(output.subarray(0, values));
  });

  it('gives zeros and minus infinity without blocks, and reads no slot of an entry without rows', async () => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const sizes = { ...small, rows: [1, 0], blocks: [[0, 0], [1, 1]] };
      const cache = randomQuantizedCache(device, new Random(7), sizes);
      device.createStream().write(cache.arguments.blockTable, new Int32Array(4).fill(-5));
      const { output, logSumExp } = await attend(device, new Random(8), sizes, cache, dtype);
      expect(output.every((x) => x === 0)).toBe(true);
      expect(logSumExp.every((x) => x === -Infinity)).toBe(true);
    }
  });

  it.each(dtypes)('merges what the output holds (%s)', async (dtype) => {
    const device = open();
    for (const headDim of [64, 80]) {
      const sizes = { ...small, headDim };
      const cache = randomQuantizedCache(device, new Random(13), sizes);
      const codes = await attend(device, new Random(14), sizes, cache, dtype);
      const random = new Random(15);
      const output = Float32Array.from(codes.output, () => random.pick([-1, -0.25, 0, 0.5, 2]));
      // One row has seen no other key.
      const logSumExp = codes.logSumExp.map((own, row) => (row === 0 ? -Infinity : Number.isFinite(own) ? own + 2 - (row % 5) : 1));
      const merged = await attend(device, new Random(14), sizes, cache, dtype, dtype, { output, logSumExp });
      logSumExp.forEach((own, row) => {
        const other = codes.logSumExp[row] ?? NaN;
        const most = Math.max(own, other);
        const all = most + Math.log(Math.exp(own - most) + Math.exp(other - most));
        expect(Math.abs((merged.logSumExp[row] ?? NaN) - all)).toBeLessThanOrEqual(1e-6 * (1 + Math.abs(all)));
        for (let at = row * headDim; at < (row + 1) * headDim; at++) {
          const parts = [Math.exp(own - all) * (output[at] ?? NaN), Math.exp(other - all) * (codes.output[at] ?? NaN)] as const;
          const magnitude = Math.abs(parts[0]) + Math.abs(parts[1]);
          const allowed = 2 * unitRoundoff[dtype] * magnitude + 2 ** -24 + 1e-5 * magnitude;
          expect(Math.abs((merged.output[at] ?? NaN) - (parts[0] + parts[1]))).toBeLessThanOrEqual(allowed);
        }
      });
    }
  });

  it('refuses to merge without log-sum-exps', () => {
    const device = open();
    const cache = randomQuantizedCache(device, new Random(16), small);
    using output = device.tensor('f32', axes, [cache.starts.at(-1) ?? NaN, small.kvHeads * small.group, small.headDim]);
    using query = device.tensor('f32', axes, output.shape);
    const call = { ...cache.arguments, query, output, scale: 1, merge: true };
    expect(() => decodeAttentionQuantized(device.createStream(), call)).toThrow(InvalidValueError);
  });

  it('keeps finite what large scores give', async () => {
    const device = open();
    for (const headDim of [64, 80]) {
      for (const louder of [40, 64]) {
        const sizes = { ...small, headDim, louder };
        const cache = randomQuantizedCache(device, new Random(9), sizes);
        const { output } = await attend(device, new Random(10), sizes, cache, 'f16');
        expect(output.every(Number.isFinite)).toBe(true);
      }
    }
  });

  it.each(['keys', 'values'] as const)('shows NaN of the %s in the rows that see it, and in no other', async (operand) => {
    const device = open();
    for (const headDim of [64, 80]) {
      const sizes = { ...small, headDim };
      const cache = randomQuantizedCache(device, new Random(11), sizes);
      const sound = await attend(device, new Random(12), sizes, cache, 'f16');
      // Of the second head of the first entry.
      const spoilt = cache.bytes[operand];
      spoilt[cache.scaleAt(operand, 0, 1, 70)] = 0xff;
      const pool = operand === 'keys' ? cache.arguments.quantizedKeys : cache.arguments.quantizedValues;
      const stream = device.createStream();
      stream.write(pool, spoilt);
      await stream.synchronize();
      const { output } = await attend(device, new Random(12), sizes, cache, 'f16');
      const sees = (index: number) => {
        const head = Math.floor(index / headDim);
        // A scale of values is of 32 dims, of which each is in a rotated run.
        const inReach = operand === 'keys' || index % headDim < Math.max(32, rotationRun(headDim));
        return head >= small.group && head < 2 * small.group && inReach;
      };
      const wrong = output.filter((x, index) => (sees(index) ? !Number.isNaN(x) : x !== sound.output[index]));
      expect(wrong).toHaveLength(0);
    }
  });

  it.each(spoiltBatches)('rejects the wait for a batch that %s', async (_, tensor, number) => {
    const device = open();
    for (const dtype of ['f32', 'f16'] as const) {
      const cache = randomQuantizedCache(device, new Random(13), small);
      await spoil(device.createStream(), cache.arguments[tensor], number);
      await expect(attend(device, new Random(14), small, cache, dtype)).rejects.toThrow(InvalidValueError);
    }
  });

  it('refuses bad input with a typed error', () => {
    const device = open();
    const stream = device.createStream();
    const cache = randomQuantizedCache(device, new Random(15), small);
    const rows = (queryHeads: number, headDim = 64) => device.tensor('f16', axes, [3, queryHeads, headDim]);
    const good = { ...cache.arguments, query: rows(6), output: rows(6), scale: 0.125 };
    expectRefusals(decodeAttentionQuantized, stream, good, [
      [{ keyBits: 5 }, CapabilityError],
      [{ keyBits: 4 }, ShapeError],
      [{ valueBits: 8 }, ShapeError],
      [{ query: rows(6, 600), output: rows(6, 600) }, CapabilityError],
      [{ query: rows(5), output: rows(5) }, ShapeError],
      [{ query: rows(6, 32), output: rows(6, 32) }, ShapeError],
      [{ scale: NaN }, InvalidValueError],
      [{ quantizedValues: device.tensor('u8', ['quantizedBlock', 'byte'], [1, 64 * 34]) }, ShapeError],
      [{ quantizedKeys: good.query }, DTypeError],
    ]);
  });
});
