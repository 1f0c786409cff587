import { decodeAttention, type ElementArray, type FloatDType } from '@kv/sparse-core';
import { describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import {
  attend,
  checkEveryGroup,
  checkMixedAgainstOracle,
  checkMixedRefusals,
  mixedCache,
  type MixedSizes,
  mixtures,
  randomMixedSizes,
  type Share,
} from '../testing/mixed-attention-checks.js';
import { mixedDecodeAttention } from './mixed-decode-attention.js';

function sizesOf(sparse: { keys: Share; values: Share }, headDim: number): MixedSizes {
  return {
    rows: [1, 2],
    keyCounts: [
      [520, 317],
      [64, 130],
    ],
    kvHeads: 2,
    group: 5,
    headDim,
    dtype: 'f16',
    sparse,
  };
}

class WholeNumbers extends Random {
  override elements<D extends FloatDType>(dtype: D, length: number): ElementArray<D> {
    return encode(dtype, Float64Array.from({ length }, () => this.integer(-3, 3)));
  }
}

describeOnDevices('mixedDecodeAttention', ({ name, open }) => {
  it('matches the float64 oracle over random shapes, dtypes and mixtures', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 8; round++) {
      const sizes = randomMixedSizes(random, [0, 1, 1, 1, 3], [-1, 0, 1, 127, 254, 256, 600]);
      await checkMixedAgainstOracle(mixedDecodeAttention, device, random, sizes);
    }
  });

  // On the CPU a product with a value that is left out is one that adds zero: the sums are the same, bit for bit. With
  // sparse keys the lanes of a sum are other dims, so that scores differ by rounding.
  it.each(mixtures)(
    'computes what the cache written out gives (keys $keys, values $values sparse)',
    async (sparse) => {
      const device = open();
      for (const headDim of [64, 128]) {
        const sizes = sizesOf(sparse, headDim);
        if (device.kind === 'cuda' || sparse.keys !== 'none') {
          await checkMixedAgainstOracle(mixedDecodeAttention, device, new Random(2), sizes);
          continue;
        }
        const cache = await mixedCache(device, new Random(2), sizes);
        const { slots, queryStart } = cache.mixed;
        const mixed = await attend(mixedDecodeAttention, device, new Random(3), sizes, cache.mixed);
        const dense = await attend(decodeAttention, device, new Random(3), sizes, {
          blocks: cache.dense,
          slots,
          queryStart,
        });
        expect(mixed).toEqual(dense);
      }
    },
  );

  it('serves every group of 1 to 16 query heads a kv head', async () => {
    await checkEveryGroup(mixedDecodeAttention, open(), 1);
  });

  // On CUDA the two kernels split the keys differently.
  it.skipIf(name === 'cuda')('gives of whole numbers, whose sums are exact, what the cache written out gives', async () => {
    const device = open();
    // Of 64 dims the scale is 1/8, exact too.
    const sizes = sizesOf({ keys: 'some', values: 'some' }, 64);
    const cache = await mixedCache(device, new WholeNumbers(8), sizes);
    const { slots, queryStart } = cache.mixed;
    const mixed = await attend(mixedDecodeAttention, device, new WholeNumbers(9), sizes, cache.mixed);
    const written = { blocks: cache.dense, slots, queryStart };
    expect(mixed).toEqual(await attend(decodeAttention, device, new WholeNumbers(9), sizes, written));
  });

  it('gives the same bits wherever the blocks lie', async () => {
    const device = open();
    const sizes = sizesOf({ keys: 'all', values: 'some' }, 128);
    const results = [];
    for (const places of [4, 5]) {
      const { mixed } = await mixedCache(device, new Random(3), sizes, new Random(places));
      results.push(await attend(mixedDecodeAttention, device, new Random(6), sizes, mixed));
    }
    expect(results[1]).toEqual(results[0]);
  });

  it('refuses bad input with a typed error', async () => {
    await checkMixedRefusals(mixedDecodeAttention, open(), new Random(7));
  });
});
