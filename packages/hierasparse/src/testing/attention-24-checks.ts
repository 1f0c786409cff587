import {
  type AttentionArguments,
  type Device,
  DTypeError,
  InvalidValueError,
  type PagedBlocks,
  ShapeError,
  type Stream,
} from '@kv/sparse-core';
import { blockEntry, blockNumber, isDense, noBlock } from '@kv/sparse-core/native';
import { attentionRow, decode, DescendingSlots, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect } from 'vitest';
import { blockTokens, type KvOperand, type SparseDType } from '../blocks-24.js';
import { compress24, type Pruning } from '../operations/compress-24.js';
import type { Attention24Arguments } from '../operations/attention-24-arguments.js';
import { readPools, type TestPools, testPools } from './test-pools-24.js';
import { expanded } from './sparse-oracle.js';

export type Attention24 = (stream: Stream, args: Attention24Arguments) => void;

/** How many of a head's full blocks are sparse. */
export type Share = 'none' | 'some' | 'all';

const everyShare: readonly Share[] = ['none', 'some', 'all'];

/** Every mixture of sparse keys and values. */
export const mixtures = everyShare.flatMap((keys) => everyShare.map((values) => ({ keys, values })));

export type Mixture = (typeof mixtures)[number];

export interface Sizes24 {
  /** Rows of each batch entry. */
  readonly rows: readonly number[];
  /** Keys of each batch entry and kv head, the entry's own rows included. */
  readonly keyCounts: readonly (readonly number[])[];
  readonly kvHeads: number;
  readonly group: number;
  readonly headDim: number;
  readonly dtype: SparseDType;
  readonly sparse: Mixture;
}

/** Two sequences whose heads hold different counts of keys, in f16, five query heads a kv head. */
export function sizesOfTwo(rows: Sizes24['rows'], keyCounts: Sizes24['keyCounts'], sparse: Mixture, headDim: number): Sizes24 {
  return { rows, keyCounts, kvHeads: 2, group: 5, headDim, dtype: 'f16', sparse };
}

export function randomSizes24(
  random: Random,
  rowCounts: readonly number[],
  earlier: readonly number[],
): Sizes24 {
  const kvHeads = random.integer(1, 3);
  const rows = Array.from({ length: random.integer(1, 3) }, () => random.pick(rowCounts));
  const share = () => random.pick(['none', 'some', 'all'] as const);
  return {
    rows,
    keyCounts: rows.map((n) => Array.from({ length: kvHeads }, () => Math.max(0, n + random.pick(earlier)))),
    kvHeads,
    group: random.pick([1, 2, 3, 4, 5, 7, 8, 16]),
    headDim: random.pick([64, 128]),
    dtype: random.pick(['f16', 'bf16']),
    sparse: { keys: share(), values: share() },
  };
}

/** A cache with 2:4 blocks, and the same one written out. */
export interface Cache24 {
  readonly mixed: Pick<Attention24Arguments, 'keys' | 'values' | 'keyCounts' | 'slots' | 'queryStart'>;
  readonly dense: PagedBlocks;
  readonly queryStart: Int32Array;
  /** The numbers of one token, of the cache written out. */
  number(operand: KvOperand, entry: number, kvHead: number, token: number): Float64Array;
}

/** What the cache holds depends on `random`, where in the pools it lies on `places`. */
export async function randomCache24(
  device: Device,
  random: Random,
  sizes: Sizes24,
  places: Random = random,
): Promise<Cache24> {
  const stream = device.createStream();
  const { rows, keyCounts, kvHeads, headDim, dtype } = sizes;
  const batch = rows.length;
  const width = Math.ceil(Math.max(1, ...keyCounts.flat()) / blockTokens) + 1;
  const count = batch * kvHeads * width;
  const sequences = new DescendingSlots(rows, keyCounts, kvHeads);

  const operand = async (name: KvOperand) => {
    const contents = random.elements(dtype, count * blockTokens * headDim);
    const table = places.permutation(count);
    const placed = new Uint16Array(contents.length);
    const blockElements = blockTokens * headDim;
    table.forEach((entry, index) => {
      placed.set(
        contents.subarray(index * blockElements, (index + 1) * blockElements),
        entry * blockElements,
      );
    });
    const poolSizes = {
      dtype,
      headDim,
      denseBlocks: count,
      sparseBlocks: count,
      table: [batch, kvHeads, width],
    } as const;
    const pools = testPools(device, poolSizes, placed, table);
    const free = [...places.permutation(count)];
    const prunings = [...sequences.keyCounts].flatMap((keys, row): Pruning[] => {
      const full = Math.floor(keys / blockTokens);
      const wanted = { none: 0, some: random.integer(0, full), all: full }[sizes.sparse[name]];
      if (wanted === 0) return [];
      const ids = table.slice(row * width, row * width + full).sort();
      const [slot, kvHead] = [Math.floor(row / kvHeads), row % kvHeads];
      const freedFrom = ids[full - wanted] ?? NaN;
      return [{ slot, kvHead, firstBlock: 0, endBlock: full, sparseIds: free.splice(0, wanted), freedFrom }];
    });
    compress24(stream, { operand: name, blocks: pools, prunings });
    return { pools, whole: await written(stream, name, headDim, pools) };
  };
  const keys = await operand('keys');
  const values = await operand('values');
  const tensor = (pool: Uint16Array) =>
    device.tensor(dtype, ['block', 'blockToken', 'dim'], [count, blockTokens, headDim], pool);
  const numbers = { keys: decode(dtype, keys.whole), values: decode(dtype, values.whole) };
  const batchTensors = sequences.place(device);
  return {
    mixed: {
      keys: keys.pools,
      values: values.pools,
      ...batchTensors,
    },
    dense: {
      keys: tensor(keys.whole),
      values: tensor(values.whole),
      blockTable: device.tensor(
        'i32',
        ['slot', 'kvHead', 'block'],
        [batch, kvHeads, width],
        Int32Array.from({ length: count }, (_, id) => id),
      ),
      keyCounts: batchTensors.keyCounts,
    },
    queryStart: sequences.queryStart,
    number(name, entry, kvHead, token) {
      const first = (sequences.tableRow(entry, kvHead) * width * blockTokens + token) * headDim;
      return numbers[name].subarray(first, first + headDim);
    },
  };
}

/** All blocks of a table, one after the other, written out by the oracle. */
async function written(
  stream: Stream,
  operand: KvOperand,
  headDim: number,
  pools: TestPools,
): Promise<Uint16Array> {
  const { table, dense, nonZeros, metadata } = await readPools(stream, pools);
  const whole = new Uint16Array(table.length * blockTokens * headDim);
  table.forEach((entry, index) => {
    const number = blockNumber(entry);
    const block = isDense(entry) ? dense(number) : expanded(operand, headDim, nonZeros(number), metadata(number));
    whole.set(block, index * blockTokens * headDim);
  });
  return whole;
}

/** Holds groups of 1 to 16 query heads to the oracle, `rows` rows each. */
export async function checkEveryGroup(attention: Attention24, device: Device, rows: number): Promise<void> {
  for (let group = 1; group <= 16; group++) {
    await checkAgainstOracle24(attention, device, new Random(group), {
      rows: [rows],
      keyCounts: [[130, 73]],
      kvHeads: 2,
      group,
      headDim: group % 2 === 0 ? 64 : 128,
      dtype: 'f16',
      sparse: { keys: 'some', values: 'all' },
    });
  }
}

/** Runs `attention` on a random cache with 2:4 blocks of these sizes, and holds every output element to the float64 oracle. */
export async function checkAgainstOracle24(
  attention: Attention24,
  device: Device,
  random: Random,
  sizes: Sizes24,
): Promise<void> {
  const { rows, keyCounts, kvHeads, group, headDim, dtype, sparse } = sizes;
  const cache = await randomCache24(device, random, sizes);
  const stream = device.createStream();
  const rowDType = device.kind === 'cuda' ? dtype : random.pick(['f32', 'f16', 'bf16'] as const);
  const weightRoundoff = device.kind === 'cuda' ? unitRoundoff[dtype] : 0;
  const causal = random.integer(0, 3) > 0;
  const scale = headDim ** -0.5;
  const tokens = cache.queryStart.at(-1) ?? NaN;
  const queryHeads = kvHeads * group;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const elements = random.elements(rowDType, tokens * queryHeads * headDim);
  const query = device.tensor(rowDType, axes, [tokens, queryHeads, headDim], elements);
  const output = device.tensor(rowDType, axes, [tokens, queryHeads, headDim]);
  const logSumExp = device.tensor('f32', ['token', 'queryHead'], [tokens, queryHeads]);
  attention(stream, {
    query,
    output,
    logSumExp,
    ...cache.mixed,
    scale,
    causal,
    sparseKeys: sparse.keys !== 'none',
    sparseValues: sparse.values !== 'none',
  });

  const [actual, actualLogSumExp] = [decode(rowDType, await output.read()), await logSumExp.read()];
  const queries = decode(rowDType, elements);
  rows.forEach((n, entry) => {
    for (let index = 0; index < n * queryHeads; index++) {
      const [row, head] = [Math.floor(index / queryHeads), index % queryHeads];
      const kvHead = Math.floor(head / group);
      const place = ((cache.queryStart[entry] ?? NaN) + row) * queryHeads + head;
      const keyCount = keyCounts[entry]?.[kvHead] ?? NaN;
      const wanted = attentionRow(
        queries.subarray(place * headDim, (place + 1) * headDim),
        causal ? keyCount - n + row + 1 : keyCount,
        scale,
        (token) => cache.number('keys', entry, kvHead, token),
        (token) => cache.number('values', entry, kvHead, token),
        weightRoundoff,
      );
      const excess = wanted.output.map((value, d) => {
        const difference = Math.abs((actual[place * headDim + d] ?? NaN) - value);
        // 2^-25: half of the smallest f16.
        return difference - (wanted.outputError + unitRoundoff[rowDType] * Math.abs(value) + 2 ** -25);
      });
      expect(Math.max(...excess)).toBeLessThanOrEqual(0);
      const logSumExpGot = actualLogSumExp[place] ?? NaN;
      if (wanted.logSumExp === -Infinity) expect(logSumExpGot).toBe(-Infinity);
      else expect(Math.abs(logSumExpGot - wanted.logSumExp)).toBeLessThanOrEqual(wanted.logSumExpError);
    }
  });
}

/** The bits that `attention` gives for random queries over a cache. */
export async function attend<Cache>(
  attention: (
    stream: Stream,
    args: Cache & Pick<Attention24Arguments, 'query' | 'output' | 'scale'>,
  ) => void,
  device: Device,
  seed: Random,
  { kvHeads, group, headDim, dtype, rows }: Sizes24,
  cache: Cache,
): Promise<unknown> {
  const tokens = rows.reduce((sum, n) => sum + n, 0);
  const shape = [tokens, kvHeads * group, headDim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const query = device.tensor(dtype, axes, shape, seed.elements(dtype, tokens * kvHeads * group * headDim));
  const output = device.tensor(device.kind === 'cuda' ? dtype : 'f32', axes, shape);
  attention(device.createStream(), { ...cache, query, output, scale: headDim ** -0.5 });
  return output.read();
}

/** That `attention` gives the bits over a cache with 2:4 blocks that `dense` gives over the same cache written out. */
export async function checkWrittenOut(
  attention: Attention24,
  dense: (stream: Stream, args: AttentionArguments) => void,
  device: Device,
  sizes: Sizes24,
  randomOf = (seed: number) => new Random(seed),
): Promise<void> {
  const cache = await randomCache24(device, randomOf(2), sizes);
  const { slots, queryStart } = cache.mixed;
  const mixed = await attend(attention, device, randomOf(3), sizes, cache.mixed);
  const written = { blocks: cache.dense, slots, queryStart };
  expect(mixed).toEqual(await attend(dense, device, randomOf(3), sizes, written));
}

/** That where in the pools a cache lies changes no bit. */
export async function checkPlaces(attention: Attention24, device: Device, sizes: Sizes24): Promise<void> {
  const results = [];
  for (const places of [4, 5]) {
    const { mixed } = await randomCache24(device, new Random(3), sizes, new Random(places));
    results.push(await attend(attention, device, new Random(6), sizes, mixed));
  }
  expect(results[1]).toEqual(results[0]);
}

/**
 * That rows have the bits of one call for all in calls of at most `mostRows` rows of one entry each. Blocks must be full where a
 * call ends: those that are sparse may not be cut.
 */
export async function checkParts24(attention: Attention24, device: Device, sizes: Sizes24, mostRows: number): Promise<void> {
  const { rows, keyCounts, kvHeads, group, headDim, dtype } = sizes;
  const { mixed, queryStart } = await randomCache24(device, new Random(8), sizes);
  const stream = device.createStream();
  const shape = [queryStart.at(-1) ?? NaN, kvHeads * group, headDim] as const;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const query = device.tensor(dtype, axes, shape, new Random(9).elements(dtype, shape[0] * shape[1] * shape[2]));
  const together = device.tensor(dtype, axes, shape);
  const apart = device.tensor(dtype, axes, shape);
  const scale = headDim ** -0.5;
  attention(stream, { query, output: together, ...mixed, scale });
  const slots = await mixed.slots.read(stream);
  rows.forEach((n, entry) => {
    const slot = slots[entry] ?? NaN;
    for (let start = 0; start < n; start += mostRows) {
      const end = Math.min(n, start + mostRows);
      const counts = Int32Array.from(keyCounts[entry] ?? [], (count) => count - (n - end));
      stream.write(mixed.keyCounts.slice('slot', slot, slot + 1), counts);
      const first = queryStart[entry] ?? NaN;
      attention(stream, {
        ...mixed,
        query: query.slice('token', first + start, first + end),
        output: apart.slice('token', first + start, first + end),
        slots: mixed.slots.slice('batch', entry, entry + 1),
        queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, end - start)),
        scale,
      });
    }
  });
  expect(await apart.read(stream)).toEqual(await together.read(stream));
}

/** That `attention` refuses what it cannot compute, at once or, what only the device knows, at the next wait. */
export async function checkRefusals24(
  attention: Attention24,
  device: Device,
  random: Random,
): Promise<void> {
  const sizes: Sizes24 = {
    rows: [2],
    keyCounts: [[130]],
    kvHeads: 1,
    group: 2,
    headDim: 64,
    dtype: 'f16',
    sparse: { keys: 'all', values: 'none' },
  };
  const cache = await randomCache24(device, random, sizes);
  const { keys, values, keyCounts } = cache.mixed;
  const axes = ['token', 'queryHead', 'dim'] as const;
  const query = device.tensor('f16', axes, [2, 2, 64], random.elements('f16', 256));
  const output = device.tensor('f16', axes, [2, 2, 64]);
  const good: Attention24Arguments = { query, output, ...cache.mixed, scale: 1 };
  const call = (wrong: Partial<Attention24Arguments>) => {
    const stream = device.createStream();
    attention(stream, { ...good, ...wrong });
    return stream.synchronize();
  };
  await call({});
  const table = (entries: readonly number[]) =>
    device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, 4], Int32Array.from(entries));
  expect(() => call({ values: { ...values, table: table([0, 1, 2, 3]).slice('block', 0, 3) } })).toThrow(
    ShapeError,
  );
  const { metadata } = keys.sparse;
  expect(() =>
    call({ keys: { ...keys, sparse: { ...keys.sparse, metadata: metadata.slice('word', 0, 64) } } }),
  ).toThrow(ShapeError);
  const others = device.tensor('bf16', ['sparseBlock', 'element'], keys.sparse.nonZeros.shape);
  expect(() => call({ keys: { ...keys, sparse: { metadata, nonZeros: others } } })).toThrow(DTypeError);
  expect(() => call({ scale: NaN })).toThrow(InvalidValueError);
  const rejected: Partial<Attention24Arguments>[] = [
    { values: { ...values, table: table([0, 1, 98, noBlock]) } },
    { values: { ...values, table: table([0, noBlock, 1, noBlock]) } },
    { values: { ...values, table: table([0, blockEntry('sparse24', 98), 1, noBlock]) } },
    // Of a kind that is not known here.
    { values: { ...values, table: table([0, (9 << 28) | 1, 1, noBlock]) } },
    // The last of 130 keys are not a full block.
    { values: { ...values, table: table([0, 1, blockEntry('sparse24', 0), noBlock]) } },
    { sparseKeys: false },
    { keyCounts: keyCounts.device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(1000)) },
  ];
  for (const wrong of rejected) await expect(call(wrong)).rejects.toThrow(InvalidValueError);
}
