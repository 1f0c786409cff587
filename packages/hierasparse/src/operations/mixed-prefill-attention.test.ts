import { prefillAttention } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import {
  attend,
  checkEveryGroup,
  checkMixedAgainstOracle,
  checkMixedRefusals,
  checkPlaces,
  mixedCache,
  type MixedSizes,
  mixtures,
  randomMixedSizes,
  type Share,
} from '../testing/mixed-attention-checks.js';
import { checkLargeScores, checkNaNShows } from '../testing/mixed-attention-extremes.js';
import { mixedPrefillAttention } from './mixed-prefill-attention.js';

function sizesOf(sparse: { keys: Share; values: Share }, headDim: number): MixedSizes {
  return {
    rows: [60, 7],
    keyCounts: [
      [200, 317],
      [64, 128],
    ],
    kvHeads: 2,
    group: 5,
    headDim,
    dtype: 'f16',
    sparse,
  };
}

describeOnDevices('mixedPrefillAttention', ({ open }) => {
  it('matches the float64 oracle over random shapes, dtypes and mixtures', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 6; round++) {
      const sizes = randomMixedSizes(random, [0, 1, 3, 17, 70, 140], [-1, 0, 1, 63, 64, 130, 200]);
      await checkMixedAgainstOracle(mixedPrefillAttention, device, random, sizes);
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
          await checkMixedAgainstOracle(mixedPrefillAttention, device, new Random(2), sizes);
          continue;
        }
        const cache = await mixedCache(device, new Random(2), sizes);
        const { slots, queryStart } = cache.mixed;
        const mixed = await attend(mixedPrefillAttention, device, new Random(3), sizes, cache.mixed);
        const dense = await attend(prefillAttention, device, new Random(3), sizes, {
          blocks: cache.dense,
          slots,
          queryStart,
        });
        expect(mixed).toEqual(dense);
      }
    },
  );

  it('serves every group of 1 to 16 query heads a kv head', async () => {
    await checkEveryGroup(mixedPrefillAttention, open(), 3);
  });

  it('keeps to the key that outscores all others by far, and ends whatever the scores', async () => {
    await checkLargeScores(mixedPrefillAttention, open(), 40);
  });

  it('shows a NaN in the rows that see it, and in no other', async () => {
    await checkNaNShows(mixedPrefillAttention, open(), 40);
  });

  it('gives the same bits wherever the blocks lie', async () => {
    await checkPlaces(mixedPrefillAttention, open(), sizesOf({ keys: 'all', values: 'some' }, 128));
  });

  it('refuses bad input with a typed error', async () => {
    await checkMixedRefusals(mixedPrefillAttention, open(), new Random(7));
  });
});
