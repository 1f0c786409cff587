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
import { prefillAttention } from './prefill-attention.js';

describeOnDevices('prefillAttention', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it('matches the float64 oracle over random shapes, strides and dtypes', async () => {
    const random = new Random(1);
    for (let round = 0; round < 20; round++) {
      const sizes = randomSizes(random, [0, 1, 2, 17, 50], [-3, 0, 0, 1, 63, 90]);
      await checkAgainstOracle(prefillAttention, device, stream, random, sizes);
    }
  });

  it('reads nothing for an entry without rows', async () => {
    const device = open();
    await checkEntriesWithoutRows(prefillAttention, device, device.createStream(), new Random(13));
  });

  it('matches it over the sizes that tensor cores take', async () => {
    const random = new Random(4);
    for (let round = 0; round < 12; round++) {
      const sizes = tensorCoreSizes(random, [0, 1, 2, 17, 50, 140], [-3, 0, 0, 1, 63, 190]);
      await checkAgainstOracle(prefillAttention, device, stream, random, sizes);
    }
  });

  it('gives the same bits for a prompt at once and in chunks', async () => {
    const [tokens, heads, dim] = [100, 4, 64];
    const random = new Random(2);
    const sizes = { kvHeads: 2, group: 2, dim, blockTokens: 16, cacheDType: 'f16', rows: [tokens] } as const;
    const { blocks } = randomCache(device, random, { ...sizes, keyCounts: [[tokens, tokens]] });
    const axes = ['token', 'queryHead', 'dim'] as const;
    using query = device.tensor('f32', axes, [tokens, heads, dim], random.elements('f32', tokens * heads * dim));
    using slots = device.tensor('i32', ['batch'], [1], Int32Array.of(0));
    const attend = async (chunk: number) => {
      using output = device.tensor('f32', axes, [tokens, heads, dim]);
      for (let start = 0; start < tokens; start += chunk) {
        const end = Math.min(tokens, start + chunk);
        using queryStart = device.tensor('i32', ['boundary'], [2], Int32Array.of(0, end - start));
        stream.write(blocks.keyCounts, Int32Array.of(end, end));
        prefillAttention(stream, {
          query: query.slice('token', start, end),
          output: output.slice('token', start, end),
          blocks,
          slots,
          queryStart,
          scale: 0.125,
        });
      }
      return await output.read();
    };
    const whole = await attend(tokens);
    for (const chunk of [1, 7, 64]) expect(await attend(chunk)).toEqual(whole);
  });

  it('gives the sequences of a batch in chunks what it gives them at once', async () => {
    const random = new Random(7);
    const shape = { kvHeads: 2, group: 2, blockTokens: 16, rows: [200, 70, 1], keyCounts: [[240, 240], [70, 70], [31, 31]] };
    for (const [dtype, dim] of [['f16', 64], ['bf16', 128], ['f32', 48]] as const) {
      const sizes = { ...shape, dim, cacheDType: dtype, rowDType: dtype };
      for (const mostRows of [200, 64, 13]) await checkParts(prefillAttention, device, stream, random, sizes, mostRows);
    }
  });

  it('keeps its precision when all scores are 1e4 higher', async () => {
    const random = new Random(5);
    for (const dtype of ['f32', 'f16', 'bf16'] as const) {
      const sizes = { kvHeads: 2, group: 2, dim: 128, blockTokens: 16, cacheDType: dtype, rowDType: dtype } as const;
      const shifted = { ...sizes, rows: [20, 37], keyCounts: [[150, 150], [37, 37]], shift: 336 };
      await checkAgainstOracle(prefillAttention, device, stream, random, shifted);
    }
  });

  it('keeps to the key that outscores all others by far, and ends whatever the scores', async () => {
    await checkLargeScores(prefillAttention, device, new Random(8), 40);
  });

  it('shows a NaN and infinity in the rows that see them, and in no other', async () => {
    await checkNaNShows(prefillAttention, device, new Random(9), 40);
  });

  it('gives a key whose score is minus infinity no weight', async () => {
    await checkMinusInfinity(prefillAttention, device, new Random(10), 40);
  });

  it('gives zeros and minus infinity to rows that see no key', async () => {
    await checkRowsWithoutKeys(prefillAttention, device, stream, new Random(6));
  });

  it('refuses bad input with a typed error', async () => {
    await checkRefusals(prefillAttention, open, new Random(3));
  });
});
