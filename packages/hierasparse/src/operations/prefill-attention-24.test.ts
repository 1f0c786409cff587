import { prefillAttention } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { it } from 'vitest';
import {
  checkEveryGroup,
  checkAgainstOracle24,
  checkRefusals24,
  checkParts24,
  checkPlaces,
  checkWrittenOut,
  type Mixture,
  mixtures,
  randomSizes24,
  sizesOfTwo,
} from '../testing/attention-24-checks.js';
import { checkLargeScores, checkLeaps, checkMinusInfinity, checkNaNShows } from '../testing/attention-24-extremes.js';
import { prefillAttention24 } from './prefill-attention-24.js';

const keyCounts = [
  [200, 317],
  [64, 128],
];

const sizesOf = (sparse: Mixture, headDim: number) => sizesOfTwo([60, 7], keyCounts, sparse, headDim);

describeOnDevices('prefillAttention24', ({ open }) => {
  it('matches the float64 oracle over random shapes, dtypes and mixtures', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 6; round++) {
      const sizes = randomSizes24(random, [0, 1, 3, 17, 70, 140], [-1, 0, 1, 63, 64, 130, 200]);
      await checkAgainstOracle24(prefillAttention24, device, random, sizes);
    }
  });

  // On the CPU a product that is left out is one that adds zero: the sums are the same, bit for bit.
  it.each(mixtures)(
    'computes what the cache written out gives (keys $keys, values $values sparse)',
    async (sparse) => {
      const device = open();
      for (const headDim of [64, 128]) {
        const sizes = sizesOf(sparse, headDim);
        if (device.kind === 'cuda') {
          await checkAgainstOracle24(prefillAttention24, device, new Random(2), sizes);
          continue;
        }
        await checkWrittenOut(prefillAttention24, prefillAttention, device, sizes);
      }
    },
  );

  it('serves every group of 1 to 16 query heads a kv head', async () => {
    await checkEveryGroup(prefillAttention24, open(), 3);
  });

  it('keeps to the key that outscores all others by far, and ends whatever the scores', async () => {
    await checkLargeScores(prefillAttention24, open(), 40);
  });

  it('loses no weight where a score leaps beyond the range of f32', async () => {
    await checkLeaps(prefillAttention24, open(), 40);
  });

  it('shows a NaN and infinity in the rows that see them, and in no other', async () => {
    await checkNaNShows(prefillAttention24, open(), 40);
  });

  it('gives a key whose score is minus infinity no weight', async () => {
    await checkMinusInfinity(prefillAttention24, open(), 40);
  });

  it('gives a row the same bits in a batch, alone and in chunks', async () => {
    const device = open();
    for (const dtype of ['f16', 'bf16'] as const) {
      for (const headDim of [64, 128]) {
        const sizes = {
          ...sizesOfTwo([192, 128], [[320, 256], [128, 448]], { keys: 'some', values: 'some' }, headDim),
          dtype,
        };
        for (const mostRows of [192, 64]) await checkParts24(prefillAttention24, device, sizes, mostRows);
      }
    }
  });

  it('gives the same bits wherever the blocks lie', async () => {
    await checkPlaces(prefillAttention24, open(), sizesOf({ keys: 'all', values: 'some' }, 128));
  });

  it('refuses bad input with a typed error', async () => {
    await checkRefusals24(prefillAttention24, open(), new Random(7));
  });
});
