import { expect, it } from 'vitest';
import {
  checkAgainstOracle,
  checkEntriesWithoutRows,
  checkParts,
  checkRefusals,
  checkRowsWithoutKeys,
  randomSizes,
  tensorCoreSizes,
} from '../testing/attention-checks.js';
import { checkLargeScores, checkMinusInfinity, checkNaNShows } from '../testing/attention-extremes.js';
import { randomCache } from '../testing/attention-oracle.js';
import { Random } from '../testing/random.js';
import { describeOnDevices } from '../testing/test-devices.js';
import { decodeAttention } from './decode-attention.js';

describeOnDevices('decodeAttention', ({ open }) => {
  it('matches the float64 oracle over random shapes, strides and dtypes', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 30; round++) {
      const sizes = randomSizes(random, [0, 1, 1, 1, 3], [-1, 0, 1, 254, 256, 600]);
      await checkAgainstOracle(decodeAttention, device, device.createStream(), random, sizes);
    }
  });

  it('matches it over the sizes that tensor cores take', async () => {
    const device = open();
    const random = new Random(4);
    for (let round = 0; round < 12; round++) {
      const sizes = tensorCoreSizes(random, [1, 1, 1, 1, 0, 2], [-1, 0, 1, 254, 256, 600]);
      await checkAgainstOracle(decodeAttention, device, device.createStream(), random, sizes);
    }
  });

  it('reads nothing for an entry without rows', async () => {
    const device = open();
    await checkEntriesWithoutRows(decodeAttention, device, device.createStream(), new Random(13));
  });

  it('gives the same bits on one thread and on three', async () => {
    const results = [];
    for (const threads of [1, 3]) {
      const device = open(threads);
      const random = new Random(2);
      const sizes = { kvHeads: 2, group: 3, dim: 64, blockTokens: 64, cacheDType: 'f16', rows: [1, 1] } as const;
      const cache = randomCache(device, random, { ...sizes, keyCounts: [[900, 30], [1, 513]] });
      const axes = ['token', 'queryHead', 'dim'] as const;
      const query = device.tensor('f32', axes, [2, 6, 64], random.elements('f32', 2 * 6 * 64));
      const output = device.tensor('f32', axes, [2, 6, 64]);
      const slots = device.tensor('i32', ['batch'], [2], cache.slots);
      const queryStart = device.tensor('i32', ['boundary'], [3], cache.queryStart);
      decodeAttention(device.createStream(), { query, output, blocks: cache.blocks, slots, queryStart, scale: 0.125 });
      results.push(await output.read());
    }
    expect(results[1]).toEqual(results[0]);
  });

  it('gives a sequence what it gets alone, whatever the splits', async () => {
    const device = open();
    const random = new Random(7);
    const lengths = [1200, 1, 64, 65, 900, 333, 16, 700];
    const shape = { kvHeads: 2, group: 4, blockTokens: 16, rows: lengths.map(() => 1), keyCounts: lengths.map((n) => [n, n]) };
    for (const [dtype, dim] of [['f16', 128], ['bf16', 64], ['f32', 48]] as const) {
      const sizes = { ...shape, dim, cacheDType: dtype, rowDType: dtype };
      await checkParts(decodeAttention, device, device.createStream(), random, sizes, 1);
    }
  });

  it('gives an entry apart the bits that it has alone, and those without rows nothing', async () => {
    const device = open();
    const stream = device.createStream();
    const keyCounts = [1200, 1, 64, 900, 333].map((count) => [count, Math.ceil(count / 2)]);
    for (const [dtype, dim] of [['f16', 128], ['f32', 48]] as const) {
      const sizes = { kvHeads: 2, group: 4, dim, blockTokens: 16, cacheDType: dtype, rowDType: dtype, rows: [1, 1, 0, 1, 1] } as const;
      const random = new Random(12);
      const { blocks, slots, queryStart } = randomCache(device, random, { ...sizes, keyCounts });
      const rows = ['token', 'queryHead', 'dim'] as const;
      const query = device.tensor(dtype, rows, [4, 8, dim], random.elements(dtype, 4 * 8 * dim));
      const attend = async (entries: Int32Array, starts: Int32Array): Promise<Float32Array> => {
        const output = device.tensor('f32', rows, [4, 8, dim], new Float32Array(4 * 8 * dim).fill(7));
        const of = device.tensor('i32', ['batch'], [entries.length], entries);
        const from = device.tensor('i32', ['boundary'], [starts.length], starts);
        decodeAttention(stream, { query, output, blocks, slots: of, queryStart: from, scale: 0.125, apart: true });
        return await output.read();
      };
      const together = await attend(slots, queryStart);
      for (const entry of [0, 1, 3, 4]) {
        const [first = 0, end = 0] = queryStart.subarray(entry, entry + 2);
        const alone = await attend(slots.slice(entry, entry + 1), Int32Array.of(first, end));
        const own = [first * 8 * dim, end * 8 * dim] as const;
        expect(alone.slice(...own)).toEqual(together.slice(...own));
        alone.fill(7, ...own);
        expect(alone.every((each) => each === 7)).toBe(true);
      }
    }
  });

  it('keeps its precision when all scores are 1e4 higher', async () => {
    const device = open();
    const random = new Random(5);
    for (const dtype of ['f32', 'f16', 'bf16'] as const) {
      const sizes = { kvHeads: 2, group: 2, dim: 128, blockTokens: 16, cacheDType: dtype, rowDType: dtype } as const;
      const shifted = { ...sizes, rows: [1, 1], keyCounts: [[300, 300], [77, 77]], shift: 336 };
      await checkAgainstOracle(decodeAttention, device, device.createStream(), random, shifted);
    }
  });

  it('keeps to the key that outscores all others by far, and ends whatever the scores', async () => {
    await checkLargeScores(decodeAttention, open(), new Random(8), 3);
  });

  it('shows a NaN and infinity in the rows that see them, and in no other', async () => {
    await checkNaNShows(decodeAttention, open(), new Random(9), 3);
  });

  it('gives a key whose score is minus infinity no weight', async () => {
    await checkMinusInfinity(decodeAttention, open(), new Random(10), 3);
  });

  it('gives zeros and minus infinity to rows that see no key', async () => {
    const device = open();
    await checkRowsWithoutKeys(decodeAttention, device, device.createStream(), new Random(6));
  });

  it('refuses bad input with a typed error', async () => {
    await checkRefusals(decodeAttention, open, new Random(3));
  });
});
