import { expect } from 'vitest';
import type { FloatDType } from '../dtype.js';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from '../errors.js';
import type { AttentionArguments } from '../operations/attention-arguments.js';
import { attentionRow, type AttentionSizes, randomCache, randomRows } from './attention-oracle.js';
import { decode, encode, type Random, unitRoundoff } from './random.js';
import type { Device, Stream } from '../handles.js';

type Attention = (stream: Stream, args: AttentionArguments) => void;

const floats: readonly FloatDType[] = ['f32', 'f16', 'bf16'];

export function randomSizes(random: Random, rowCounts: readonly number[], earlier: readonly number[]): AttentionSizes {
  const kvHeads = random.integer(1, 3);
  const rows = Array.from({ length: random.integer(1, 3) }, () => random.pick(rowCounts));
  return {
    rows,
    keyCounts: rows.map((n) => Array.from({ length: kvHeads }, () => Math.max(0, n + random.pick(earlier)))),
    kvHeads,
    group: random.integer(1, 5),
    dim: random.pick([1, 7, 32, 64, 80, 96, 128, 129, 256]),
    blockTokens: random.pick([1, 16, 50, 64]),
    cacheDType: random.pick(floats),
  };
}

/** Sizes that the tensor-core kernels of CUDA devices take. */
export function tensorCoreSizes(random: Random, rowCounts: readonly number[], earlier: readonly number[]): AttentionSizes {
  const dtype = random.pick(['f16', 'bf16'] as const);
  const sizes = randomSizes(random, rowCounts, earlier);
  return { ...sizes, dim: random.pick([64, 128]), blockTokens: random.pick([16, 64]), cacheDType: dtype, rowDType: dtype };
}

function poison<D extends FloatDType>(dtype: D, shape: readonly number[]) {
  return encode(dtype, new Float64Array(shape.reduce((product, extent) => product * extent, 1)).fill(NaN));
}

function poisonedLogSumExp(device: Device, tokens: number, queryHeads: number) {
  return device.tensor('f32', ['token', 'queryHead'], [tokens, queryHeads], poison('f32', [tokens, queryHeads]));
}

/**
 * Runs `attention` on a random problem of these sizes, and holds every output element to the float64 oracle. Of the keys
 * that a row sees, it `attends` to all unless told otherwise. Rows ahead of the first entry's are no entry's, and stay as
 * they are.
 */
export async function checkAgainstOracle(
  attention: Attention,
  device: Device,
  stream: Stream,
  random: Random,
  sizes: AttentionSizes,
  attends: (entry: number, queryHead: number, row: number, key: number) => boolean = () => true,
): Promise<void> {
  const { rows, keyCounts, kvHeads, group, dim } = sizes;
  const cache = randomCache(device, random, sizes);
  const { cacheDType, rowDType } = sizes;
  const [queryDType, outputDType] = [rowDType ?? random.pick(floats), rowDType ?? random.pick(floats)];
  const mayUseTensorCores =
    device.kind === 'cuda' && cacheDType !== 'f32' && queryDType === cacheDType && outputDType === cacheDType;
  const causal = random.integer(0, 3) > 0;
  const scale = dim ** -0.5;
  const ahead = random.integer(0, 3);
  const starts = cache.queryStart.map((start) => ahead + start);
  const tokens = starts.at(-1) ?? NaN;
  const queryHeads = kvHeads * group;
  // One row and one head more than are used, so that strides are not those of the shape.
  const shape = [tokens + 1, queryHeads + 1, dim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const elements = randomRows(random, queryDType, (tokens + 1) * (queryHeads + 1), sizes);
  using wholeQuery = device.tensor(queryDType, axes, shape, elements);
  using wholeOutput = device.tensor(outputDType, axes, shape, poison(outputDType, shape));
  using logSumExp = poisonedLogSumExp(device, tokens, queryHeads);
  using slots = device.tensor('i32', ['batch'], [rows.length], cache.slots);
  using queryStart = device.tensor('i32', ['boundary'], [rows.length + 1], starts);
  const output = wholeOutput.slice('token', 0, tokens).slice('queryHead', 0, queryHeads);
  const query = wholeQuery.slice('token', 0, tokens).slice('queryHead', 0, queryHeads);
  attention(stream, { query, output, logSumExp, blocks: cache.blocks, slots, queryStart, scale, causal });

  const [actual, actualLogSumExp] = [decode(outputDType, await output.read()), await logSumExp.read()];
  const queries = decode(queryDType, elements);
  expect(actual.subarray(0, ahead * queryHeads * dim).every(Number.isNaN)).toBe(true);
  expect(actualLogSumExp.subarray(0, ahead * queryHeads).every(Number.isNaN)).toBe(true);
  rows.forEach((n, entry) => {
    for (let index = 0; index < n * queryHeads; index++) {
      const [row, head] = [Math.floor(index / queryHeads), index % queryHeads];
      const kvHead = Math.floor(head / group);
      const token = (starts[entry] ?? NaN) + row;
      const keyCount = keyCounts[entry]?.[kvHead] ?? NaN;
      const first = (token * (queryHeads + 1) + head) * dim;
      const visible = Math.max(0, causal ? keyCount - n + row + 1 : keyCount);
      const keys = Array.from({ length: visible }, (_, key) => key).filter((key) => attends(entry, head, row, key));
      const wanted = attentionRow(
        queries.subarray(first, first + dim),
        keys.length,
        scale,
        (index) => cache.key(entry, kvHead, keys[index] ?? NaN),
        (index) => cache.value(entry, kvHead, keys[index] ?? NaN),
        mayUseTensorCores ? unitRoundoff[cacheDType] : 0,
      );
      const excess = wanted.output.map((value, d) => {
        const difference = Math.abs((actual[(token * queryHeads + head) * dim + d] ?? NaN) - value);
        // 2^-25: half of the smallest f16.
        return difference - (wanted.outputError + unitRoundoff[outputDType] * Math.abs(value) + 2 ** -25);
      });
      expect(Math.max(...excess)).toBeLessThanOrEqual(0);
      const logSumExpGot = actualLogSumExp[token * queryHeads + head] ?? NaN;
      if (wanted.logSumExp === -Infinity) expect(logSumExpGot).toBe(-Infinity);
      else expect(Math.abs(logSumExpGot - wanted.logSumExp)).toBeLessThanOrEqual(wanted.logSumExpError);
    }
  });
  cache.dispose();
}

/**
 * Computes a batch at once, and then in calls of at most `mostRows` rows of one entry each. Every row must be the
 * same bits on the CPU; elsewhere each result is off by what f32 arithmetic may add, so they differ by at most twice
 * that.
 */
export async function checkParts(
  attention: Attention,
  device: Device,
  stream: Stream,
  random: Random,
  sizes: AttentionSizes & { readonly rowDType: FloatDType },
  mostRows: number,
): Promise<void> {
  const { rows, keyCounts, kvHeads, group, dim, rowDType: dtype } = sizes;
  const cache = randomCache(device, random, sizes);
  const tokens = cache.queryStart.at(-1) ?? NaN;
  const shape = [tokens, kvHeads * group, dim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const elements = randomRows(random, dtype, tokens * kvHeads * group, sizes);
  using query = device.tensor(dtype, axes, shape, elements);
  const common = { blocks: cache.blocks, scale: dim ** -0.5 };
  const results = async (enqueue: (output: typeof query, logSumExp: ReturnType<typeof poisonedLogSumExp>) => void) => {
    using output = device.tensor(dtype, axes, shape, poison(dtype, shape));
    using logSumExp = poisonedLogSumExp(device, tokens, kvHeads * group);
    enqueue(output, logSumExp);
    return { output: decode(dtype, await output.read()), logSumExp: await logSumExp.read() };
  };
  const whole = await results((output, logSumExp) => {
    using slots = device.tensor('i32', ['batch'], [rows.length], cache.slots);
    using queryStart = device.tensor('i32', ['boundary'], [rows.length + 1], cache.queryStart);
    attention(stream, { ...common, query, output, logSumExp, slots, queryStart });
  });
  const parts = await results((output, logSumExp) => {
    rows.forEach((n, entry) => {
      using slots = device.tensor('i32', ['batch'], [1], cache.slots.subarray(entry, entry + 1));
      for (let start = 0; start < n; start += mostRows) {
        const end = Math.min(n, start + mostRows);
        const counts = new Int32Array(rows.length * kvHeads);
        keyCounts[entry]?.forEach((count, head) => {
          counts[(cache.slots[entry] ?? NaN) * kvHeads + head] = Math.max(0, count - (n - end));
        });
        stream.write(cache.blocks.keyCounts, counts);
        using queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, end - start));
        const first = cache.queryStart[entry] ?? NaN;
        const part = <T extends typeof query | typeof logSumExp>(tensor: T) =>
          tensor.slice('token', first + start, first + end) as T;
        const [partOutput, partLogSumExp] = [part(output), part(logSumExp)];
        attention(stream, { ...common, query: part(query), output: partOutput, logSumExp: partLogSumExp, slots, queryStart });
      }
    });
  });
  if (device.kind === 'cpu') {
    expect(parts).toEqual(whole);
  } else {
    const roundoff = dtype === sizes.cacheDType ? unitRoundoff[dtype] : 0;
    const queries = decode(dtype, elements);
    rows.forEach((n, entry) => {
      for (let index = 0; index < n * kvHeads * group; index++) {
        const kvHead = Math.floor((index % (kvHeads * group)) / group);
        const at = (cache.queryStart[entry] ?? NaN) * kvHeads * group + index;
        const wanted = attentionRow(
          queries.subarray(at * dim, (at + 1) * dim),
          (keyCounts[entry]?.[kvHead] ?? NaN) - n + Math.floor(index / (kvHeads * group)) + 1,
          common.scale,
          (key) => cache.key(entry, kvHead, key),
          (key) => cache.value(entry, kvHead, key),
          roundoff,
        );
        const excess = wanted.output.map((value, d) => {
          const difference = Math.abs((parts.output[at * dim + d] ?? NaN) - (whole.output[at * dim + d] ?? NaN));
          return difference - 2 * (wanted.outputError + unitRoundoff[dtype] * Math.abs(value) + 2 ** -25);
        });
        expect(Math.max(...excess)).toBeLessThanOrEqual(0);
        const [one, other] = [parts.logSumExp[at] ?? NaN, whole.logSumExp[at] ?? NaN];
        if (one !== other) expect(Math.abs(one - other)).toBeLessThanOrEqual(2 * wanted.logSumExpError);
      }
    });
  }
  cache.dispose();
}

/** Rows that see no key give exactly 0, and minus infinity. */
export async function checkRowsWithoutKeys(attention: Attention, device: Device, stream: Stream, random: Random) {
  const [rows, kvHeads, group, dim] = [[3, 1, 2], 2, 2, 64];
  for (const dtype of floats) {
    const keyCounts = [[0, 1], [0, 0], [1, 0]];
    const cache = randomCache(device, random, { rows, keyCounts, kvHeads, group, dim, blockTokens: 16, cacheDType: dtype });
    const shape = [6, kvHeads * group, dim] as const;
    const axes = ['token', 'queryHead', 'dim'] as const;
    using query = device.tensor(dtype, axes, shape, random.elements(dtype, 6 * kvHeads * group * dim));
    using output = device.tensor(dtype, axes, shape, poison(dtype, shape));
    using logSumExp = poisonedLogSumExp(device, 6, kvHeads * group);
    using slots = device.tensor('i32', ['batch'], [3], cache.slots);
    using queryStart = device.tensor('i32', ['boundary'], [4], cache.queryStart);
    attention(stream, { query, output, logSumExp, blocks: cache.blocks, slots, queryStart, scale: 0.125 });
    const [outputs, sums] = [decode(dtype, await output.read()), await logSumExp.read()];
    // Of each entry's rows the last sees its key, where its kv head has one.
    const seeing = (token: number, head: number) => (token === 2 && head >= group) || (token === 5 && head < group);
    for (let index = 0; index < 6 * kvHeads * group; index++) {
      const sees = seeing(Math.floor(index / (kvHeads * group)), index % (kvHeads * group));
      const row = outputs.subarray(index * dim, (index + 1) * dim);
      expect(row.every((value) => (sees ? Number.isFinite(value) : value === 0))).toBe(true);
      expect(Number.isFinite(sums[index])).toBe(sees);
      if (!sees) expect(sums[index]).toBe(-Infinity);
    }
    cache.dispose();
  }
}

/** Every wrong argument gets its own error at once; a table that leads outside rejects the next wait. */
export async function checkRefusals(attention: Attention, open: () => Device, random: Random): Promise<void> {
  const device = open();
  const sizes = { rows: [2], keyCounts: [[2]], kvHeads: 1, group: 2, dim: 8, blockTokens: 4, cacheDType: 'f16' } as const;
  const cache = randomCache(device, random, sizes);
  const axes = ['token', 'queryHead', 'dim'] as const;
  const slots = device.tensor('i32', ['batch'], [1], cache.slots);
  const queryStart = device.tensor('i32', ['boundary'], [2], cache.queryStart);
  const query = device.tensor('f32', axes, [2, 2, 8], new Float32Array(32));
  const output = device.tensor('f32', axes, [2, 2, 8]);
  const good = { query, output, blocks: cache.blocks, slots, queryStart, scale: 1 };
  const stream = device.createStream();
  attention(stream, good);
  await stream.synchronize();

  const refuse = (wrong: Partial<Record<keyof AttentionArguments, unknown>>, error: new (...args: never[]) => Error) => {
    expect(() => {
      attention(stream, { ...good, ...wrong } as AttentionArguments);
    }).toThrow(error);
  };
  const blocksWith = (wrong: object) => ({ blocks: { ...cache.blocks, ...wrong } });
  refuse({ query: device.tensor('f32', axes, [2, 2, 7]) }, ShapeError);
  refuse({ output: output.slice('token', 0, 1) }, ShapeError);
  refuse({ query: device.tensor('i32', axes, [2, 2, 8]) }, DTypeError);
  refuse({ logSumExp: device.tensor('f32', ['token', 'queryHead'], [2, 1]) }, ShapeError);
  refuse({ queryStart: device.tensor('i32', ['boundary'], [3]) }, ShapeError);
  refuse({ slots: device.tensor('f32', ['batch'], [1]) }, DTypeError);
  refuse({ scale: NaN }, InvalidValueError);
  refuse({ query: open().tensor('f32', axes, [2, 2, 8]) }, DeviceError);
  refuse(blocksWith({ values: device.tensor('f32', ['block', 'blockToken', 'dim'], cache.blocks.keys.shape) }), DTypeError);
  refuse(blocksWith({ keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 3]) }), ShapeError);

  await checkTablesOutside(attention, device, random, { ...sizes, rowDType: 'f32' });
  await checkTablesOutside(attention, device, random, { ...sizes, dim: 64, blockTokens: 16, rowDType: 'f16' });
}

/** A table that leads outside rejects the next wait. */
async function checkTablesOutside(
  attention: Attention,
  device: Device,
  random: Random,
  sizes: AttentionSizes & { readonly rowDType: FloatDType },
): Promise<void> {
  const cache = randomCache(device, random, sizes);
  const { blocks } = cache;
  const shape = [2, 2, sizes.dim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const good = {
    query: device.tensor(sizes.rowDType, axes, shape, random.elements(sizes.rowDType, 4 * sizes.dim)),
    output: device.tensor(sizes.rowDType, axes, shape),
    blocks,
    slots: device.tensor('i32', ['batch'], [1], cache.slots),
    queryStart: device.tensor('i32', ['boundary'], [2], cache.queryStart),
    scale: 1,
  };
  const { blockTable, keyCounts } = blocks;
  const unknown = new Int32Array(blockTable.shape.reduce((product, extent) => product * extent, 1)).fill(1 << 20);
  const tooMany = new Int32Array(keyCounts.shape[0] * keyCounts.shape[1]).fill(1000);
  for (const outside of [
    { slots: device.tensor('i32', ['batch'], [1], Int32Array.of(9)) },
    { queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 3)) },
    { blocks: { ...blocks, keyCounts: device.tensor('i32', ['slot', 'kvHead'], keyCounts.shape, tooMany) } },
    { blocks: { ...blocks, blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], blockTable.shape, unknown) } },
  ]) {
    const stream = device.createStream();
    attention(stream, { ...good, ...outside });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  }
  cache.dispose();
}

/** An entry without rows changes no bit of the others, and its slot's blocks may be anywhere. */
export async function checkEntriesWithoutRows(attention: Attention, device: Device, stream: Stream, random: Random) {
  for (const [dtype, dim, blockTokens] of [['f32', 8, 4], ['f16', 64, 16]] as const) {
    const sizes = { rows: [1, 0, 1], keyCounts: [[70], [90], [33]], kvHeads: 1, group: 2, dim, blockTokens, cacheDType: dtype };
    const cache = randomCache(device, random, sizes);
    const { blockTable } = cache.blocks;
    const [unused = NaN, ...used] = [cache.slots[1], cache.slots[0], cache.slots[2]];
    stream.write(blockTable.slice('slot', unused, unused + 1), new Int32Array(blockTable.shape[2]).fill(-1));
    const shape = [2, 2, dim] as const;
    const axes = ['token', 'queryHead', 'dim'] as const;
    using query = device.tensor(dtype, axes, shape, random.elements(dtype, 4 * dim));
    const results = [];
    for (const [named, starts] of [[cache.slots, [0, 1, 1, 2]], [used, [0, 1, 2]]] as const) {
      using slots = device.tensor('i32', ['batch'], [named.length], Int32Array.from(named, (slot) => slot ?? NaN));
      using queryStart = device.tensor('i32', ['boundary'], [starts.length], Int32Array.from(starts));
      using output = device.tensor(dtype, axes, shape, poison(dtype, shape));
      attention(stream, { query, output, blocks: cache.blocks, slots, queryStart, scale: 0.125 });
      results.push(await output.read());
    }
    expect(results[0]).toEqual(results[1]);
    cache.dispose();
  }
}
