import { expect, it } from 'vitest';
import { InvalidValueError } from '../errors.js';
import type { Device, Stream } from '../handles.js';
import {
  checkAgainstOracle,
  checkEntriesWithoutRows,
  checkRefusals,
  randomSizes,
  tensorCoreSizes,
} from '../testing/attention-checks.js';
import { type AttentionSizes, randomCache } from '../testing/attention-oracle.js';
import { everyBlock, keyBlockLists, type QueryTile } from '../testing/key-block-lists.js';
import { decode, encode, Random, unitRoundoff } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import type { AttentionArguments } from './attention-arguments.js';
import { blockSparseAttention } from './block-sparse-attention.js';
import { prefillAttention } from './prefill-attention.js';

type Sizes = AttentionSizes & { readonly rowDType: 'f32' | 'f16' | 'bf16' };
type Attention = (stream: Stream, args: AttentionArguments) => void;

const axes = ['token', 'queryHead', 'dim'] as const;

/** About a share of the blocks; at times none, or all. */
const randomBlocks = (random: Random) => (tile: QueryTile) => {
  const share = random.pick([0, 0.2, 0.5, 1]);
  return everyBlock(tile).filter(() => random.next() < share);
};

/** A problem whose operation may run again and again, from a cache that stays. */
function problem(device: Device, random: Random, sizes: Sizes) {
  const stream = device.createStream();
  const { rowDType: dtype, kvHeads, group, dim } = sizes;
  const cache = randomCache(device, random, sizes);
  const tokens = cache.queryStart.at(-1) ?? NaN;
  const shape = [tokens, kvHeads * group, dim] as const;
  const poison = encode(dtype, new Float64Array(tokens * kvHeads * group * dim).fill(NaN));
  const query = device.tensor(dtype, axes, shape, random.elements(dtype, tokens * kvHeads * group * dim));
  const slots = device.tensor('i32', ['batch'], [sizes.rows.length], cache.slots);
  const queryStart = device.tensor('i32', ['boundary'], [sizes.rows.length + 1], cache.queryStart);
  const run = async (attention: Attention, causal = true) => {
    using output = device.tensor(dtype, axes, shape, poison);
    const sums = new Float32Array(tokens * kvHeads * group).fill(NaN);
    using logSumExp = device.tensor('f32', ['token', 'queryHead'], [tokens, kvHeads * group], sums);
    const args = { query, output, logSumExp, blocks: cache.blocks, slots, queryStart, scale: dim ** -0.5, causal };
    attention(stream, args);
    return { output: await output.read(), logSumExp: await logSumExp.read() };
  };
  return { cache, query, slots, queryStart, stream, run };
}

const sparse =
  (lists: Pick<ReturnType<typeof keyBlockLists>, 'keyBlocks' | 'keyBlockCounts'>): Attention =>
  (stream, args) => {
    blockSparseAttention(stream, { ...args, keyBlocks: lists.keyBlocks, keyBlockCounts: lists.keyBlockCounts });
  };

describeOnDevices('blockSparseAttention', ({ open }) => {
  const device = open();

  it('matches the float64 oracle over random lists, shapes, strides and dtypes', async () => {
    const random = new Random(1);
    const stream = device.createStream();
    for (let round = 0; round < 24; round++) {
      const sizesOf = round % 2 === 0 ? randomSizes : tensorCoreSizes;
      const sizes = sizesOf(random, [0, 1, 17, 130, 300], [-3, 0, 0, 1, 63, 190]);
      let lists: ReturnType<typeof keyBlockLists> | undefined;
      const attention: Attention = (on, args) => {
        lists = keyBlockLists(device, sizes, args.causal !== false, randomBlocks(random));
        sparse(lists)(on, args);
      };
      await checkAgainstOracle(attention, device, stream, random, sizes, (...place) => lists?.attends(...place) ?? false);
    }
  });

  it('gives the bits of prefillAttention when all blocks are listed', async () => {
    const random = new Random(2);
    const rows = [300, 0, 70, 1, 128];
    const shape = { kvHeads: 2, group: 2, rows, keyCounts: [[300, 310], [9, 9], [400, 400], [65, 3], [128, 100]] };
    for (const [dtype, dim, blockTokens] of [['f16', 128, 64], ['bf16', 64, 16], ['f32', 48, 50], ['f16', 96, 7]] as const) {
      const sizes = { ...shape, dim, blockTokens, cacheDType: dtype, rowDType: dtype };
      const { run } = problem(device, random, sizes);
      for (const causal of [true, false]) {
        const lists = keyBlockLists(device, sizes, causal, everyBlock);
        expect(await run(sparse(lists), causal)).toEqual(await run(prefillAttention, causal));
      }
    }
  });

  it('gives rows whose lists are empty zeros and minus infinity', async () => {
    for (const [dtype, dim] of [['f16', 128], ['f32', 48]] as const) {
      const shape = { kvHeads: 1, group: 2, rows: [200], keyCounts: [[260]], dim, blockTokens: 16 };
      const sizes = { ...shape, cacheDType: dtype, rowDType: dtype };
      const { run } = problem(device, new Random(3), sizes);
      const { output, logSumExp } = await run(sparse(keyBlockLists(device, sizes, true, () => [])));
      expect(output.every((bits) => bits === 0)).toBe(true);
      expect(logSumExp.every((number) => number === -Infinity)).toBe(true);
    }
  });

  it('gives each sequence of a batch the bits that it has alone', async () => {
    const random = new Random(4);
    for (const [dtype, dim] of [['f16', 128], ['bf16', 64], ['f32', 48]] as const) {
      const rows = [260, 5, 140];
      const shape = { kvHeads: 2, group: 2, rows, keyCounts: [[400, 400], [90, 80], [140, 140]], dim, blockTokens: 16 };
      const sizes = { ...shape, cacheDType: dtype, rowDType: dtype };
      const { run, query, cache } = problem(device, random, sizes);
      const drawn = new Map<string, readonly number[]>();
      const list = randomBlocks(random);
      const remember = (entry: number) => (tile: QueryTile) => {
        const place = `${entry} ${tile.queryHead} ${tile.limit}`;
        const blocks = drawn.get(place) ?? list(tile);
        drawn.set(place, blocks);
        return blocks;
      };
      const together = await run(sparse(keyBlockLists(device, sizes, true, (tile) => remember(tile.entry)(tile))));
      for (const [entry, count] of sizes.rows.entries()) {
        const first = cache.queryStart[entry] ?? NaN;
        const alone = await run((stream, args) => {
          const one = { ...sizes, rows: [count], keyCounts: [sizes.keyCounts[entry] ?? []] };
          const lists = keyBlockLists(device, one, true, remember(entry));
          sparse(lists)(stream, {
            ...args,
            query: query.slice('token', first, first + count),
            output: args.output.slice('token', first, first + count),
            logSumExp: args.logSumExp?.slice('token', first, first + count),
            slots: device.tensor('i32', ['batch'], [1], cache.slots.subarray(entry, entry + 1)),
            queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, count)),
          });
        });
        const rowNumbers = (all: typeof together, perRow: number) => [
          all.output.subarray(first * perRow * dim, (first + count) * perRow * dim),
          all.logSumExp.subarray(first * perRow, (first + count) * perRow),
        ];
        expect(rowNumbers(alone, 4)).toEqual(rowNumbers(together, 4));
      }
    }
  });

  it('loses no more than the mass of the blocks that are left out times the largest value', async () => {
    for (const [dtype, dim] of [['f16', 128], ['bf16', 64], ['f32', 48]] as const) {
      const shape = { kvHeads: 2, group: 2, rows: [300, 128], keyCounts: [[420, 420], [700, 128]], dim, blockTokens: 16 };
      const sizes = { ...shape, cacheDType: dtype, rowDType: dtype };
      const random = new Random(9);
      const { run, cache } = problem(device, random, sizes);
      const dense = await run(prefillAttention);
      const kept = await run(sparse(keyBlockLists(device, sizes, true, randomBlocks(random))));
      const largest = decode(dtype, await cache.blocks.values.read()).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      const [exact, found] = [decode(dtype, dense.output), decode(dtype, kept.output)];
      let [lossy, excess] = [0, -Infinity];
      dense.logSumExp.forEach((whole, row) => {
        const share = Math.exp((kept.logSumExp[row] ?? NaN) - whole);
        lossy += Number(share < 0.5);
        for (let at = row * dim; at < (row + 1) * dim; at++) {
          // The paper does not divide by what is left.
          const distance = Math.abs((exact[at] ?? NaN) - share * (found[at] ?? NaN));
          excess = Math.max(excess, distance - (1 - share + 2 * unitRoundoff[dtype] + 1e-5) * largest);
        }
      });
      expect(excess).toBeLessThanOrEqual(0);
      expect(lossy).toBeGreaterThan(10);
    }
  });

  it('has on every device the same bits of small integers', async () => {
    const [rows, dim] = [200, 64];
    const sizes = { kvHeads: 1, group: 1, rows: [rows], keyCounts: [[rows]], dim, blockTokens: 16 };
    const small = (count: number) => encode('f16', Float64Array.from({ length: count }, (_, index) => ((index * 7) % 5) - 2));
    const pool = (numbers: Uint16Array) => device.tensor('f16', ['block', 'blockToken', 'dim'], [13, 16, dim], numbers);
    using output = device.tensor('f16', axes, [rows, 1, dim]);
    const listed = (tile: QueryTile) => everyBlock(tile).filter((block) => block % 2 === 0);
    const lists = keyBlockLists(device, sizes, true, listed);
    sparse(lists)(device.defaultStream, {
      // Zeros weigh all keys of a row alike, and a power of two of them has an exact mean.
      query: device.tensor('f16', axes, [rows, 1, dim], new Uint16Array(rows * dim)),
      output,
      blocks: {
        keys: pool(small(13 * 16 * dim)),
        values: pool(small(13 * 16 * dim)),
        blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, 13], Int32Array.from({ length: 13 }, (_, block) => block)),
        keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(rows)),
      },
      slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, rows)),
      scale: 1,
    });
    const [values, found] = [decode('f16', small(13 * 16 * dim)), decode('f16', await output.read())];
    for (const row of [0, 1, 3, 7, 15, 31, 63, 127, 191]) {
      const keys = Array.from({ length: row + 1 }, (_, key) => key).filter((key) => lists.attends(0, 0, row, key));
      expect(Math.log2(keys.length) % 1).toBe(0);
      for (let at = 0; at < dim; at++) {
        const sum = keys.reduce((total, key) => total + (values[key * dim + at] ?? NaN), 0);
        expect(found[row * dim + at]).toBe(sum / keys.length);
      }
    }
  });

  it('reads nothing of blocks that no list names', async () => {
    for (const [dtype, dim] of [['f16', 128], ['f32', 48]] as const) {
      const shape = { kvHeads: 1, group: 1, rows: [256], keyCounts: [[256]], dim, blockTokens: 64 };
      const sizes = { ...shape, cacheDType: dtype, rowDType: dtype };
      const { run, cache, stream } = problem(device, new Random(5), sizes);
      const lists = keyBlockLists(device, sizes, true, ({ limit }) => (limit === 2 ? [1] : [0, 3]));
      const sound = await run(sparse(lists));
      const spoilt = (await cache.blocks.blockTable.read())[2] ?? NaN;
      for (const pool of [cache.blocks.keys, cache.blocks.values]) {
        stream.write(pool.slice('block', spoilt, spoilt + 1), encode(dtype, new Float64Array(64 * dim).fill(NaN)));
      }
      expect(await run(sparse(lists))).toEqual(sound);
    }
  });

  it('rejects the next wait for lists that are none, and lives', async () => {
    for (const [dtype, dim] of [['f16', 128], ['f32', 48]] as const) {
      const shape = { kvHeads: 1, group: 2, rows: [200, 10], keyCounts: [[260], [64]], dim, blockTokens: 16 };
      const sizes = { ...shape, cacheDType: dtype, rowDType: dtype };
      const { query, cache, slots, queryStart } = problem(device, new Random(6), sizes);
      const args = { query, blocks: cache.blocks, slots, queryStart, scale: 1, output: device.tensor(dtype, axes, query.shape) };
      // Tiles of the entries: rows 0 to 127 see blocks 0 to 2, rows 128 to 199 blocks 0 to 4; the second entry sees block 0.
      const good = { 3: [0, 2], 5: [0, 2, 4], 1: [0] };
      const run = async (change: Partial<Record<1 | 3 | 5, readonly number[]>>, counts?: number, tiles?: number) => {
        const stream = device.createStream();
        const lists = keyBlockLists(device, sizes, true, ({ limit, queryHead }) =>
          (queryHead === 1 ? { ...good, ...change } : good)[limit as 1 | 3 | 5],
        );
        const last = lists.keyBlockCounts.slice('queryHead', 1, 2).slice('queryTile', 2, 3);
        if (counts !== undefined) stream.write(last, Int32Array.of(counts));
        const few = tiles ?? lists.keyBlockCounts.shape[1];
        const capacity = lists.keyBlocks.shape[2];
        const blocks = (await lists.keyBlocks.read()).subarray(0, 2 * few * capacity);
        const lengths = (await lists.keyBlockCounts.read()).subarray(0, 2 * few);
        blockSparseAttention(stream, {
          ...args,
          keyBlocks: device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [2, few, capacity], blocks),
          keyBlockCounts: device.tensor('i32', ['queryHead', 'queryTile'], [2, few], lengths),
        });
        await stream.synchronize();
      };
      await run({});
      for (const wrong of [[2, 0], [1, 1], [0, -1], [-1], [5], [1 << 30]]) {
        await expect(run({ 5: wrong })).rejects.toThrow(InvalidValueError);
      }
      for (const ahead of [{ 3: [3] }, { 1: [1] }]) await expect(run(ahead)).rejects.toThrow(InvalidValueError);
      for (const counts of [-1, 5, 1 << 30]) await expect(run({}, counts)).rejects.toThrow(InvalidValueError);
      await expect(run({}, undefined, 2)).rejects.toThrow(InvalidValueError);
      await run({});
    }
  });

  it('refuses other bad input as prefillAttention does', async () => {
    const sizes = { kvHeads: 1, group: 2, rows: [2], keyCounts: [[2]] };
    const attention: Attention = (stream, args) => {
      sparse(keyBlockLists(stream.device, sizes, true, everyBlock))(stream, args);
    };
    await checkRefusals(attention, open, new Random(7));
  });

  it('reads nothing for an entry without rows', async () => {
    const attention: Attention = (stream, args) => {
      const rows = args.slots.shape[0] === 3 ? [1, 0, 1] : [1, 1];
      const keyCounts = args.slots.shape[0] === 3 ? [[70], [90], [33]] : [[70], [33]];
      sparse(keyBlockLists(stream.device, { kvHeads: 1, group: 2, rows, keyCounts }, true, everyBlock))(stream, args);
    };
    await checkEntriesWithoutRows(attention, device, device.createStream(), new Random(8));
  });
});
