import { decodeAttention, type ElementArray, type FloatDType } from '@kv/sparse-core';
import { describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockTokens } from '../blocks-24.js';
import {
  checkEveryGroup,
  checkAgainstOracle24,
  checkRefusals24,
  checkPlaces,
  checkWrittenOut,
  randomCache24,
  type Mixture,
  mixtures,
  randomSizes24,
  sizesOfTwo,
} from '../testing/attention-24-checks.js';
import { checkLargeScores, checkLeaps, checkMinusInfinity, checkNaNShows } from '../testing/attention-24-extremes.js';
import { compress24, type Pruning } from './compress-24.js';
import { decodeAttention24 } from './decode-attention-24.js';

const keyCounts = [
  [520, 317],
  [64, 130],
];

const sizesOf = (sparse: Mixture, headDim: number) => sizesOfTwo([1, 2], keyCounts, sparse, headDim);

class WholeNumbers extends Random {
  override elements<D extends FloatDType>(dtype: D, length: number): ElementArray<D> {
    return encode(dtype, Float64Array.from({ length }, () => this.integer(-3, 3)));
  }
}

describeOnDevices('decodeAttention24', ({ name, open }) => {
  it('matches the float64 oracle over random shapes, dtypes and mixtures', async () => {
    const device = open();
    const random = new Random(1);
    for (let round = 0; round < 8; round++) {
      const sizes = randomSizes24(random, [0, 1, 1, 1, 3], [-1, 0, 1, 127, 254, 256, 600]);
      await checkAgainstOracle24(decodeAttention24, device, random, sizes);
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
          await checkAgainstOracle24(decodeAttention24, device, new Random(2), sizes);
          continue;
        }
        await checkWrittenOut(decodeAttention24, decodeAttention, device, sizes);
      }
    },
  );

  it('serves every group of 1 to 16 query heads a kv head', async () => {
    await checkEveryGroup(decodeAttention24, open(), 1);
  });

  // On CUDA the two kernels split the keys differently.
  it.skipIf(name === 'cuda')('gives of whole numbers, whose sums are exact, what the cache written out gives', async () => {
    const device = open();
    // Of 64 dims the scale is 1/8, exact too.
    const sizes = sizesOf({ keys: 'some', values: 'some' }, 64);
    await checkWrittenOut(decodeAttention24, decodeAttention, device, sizes, (seed) => new WholeNumbers(seed));
  });

  it('keeps to the key that outscores all others by far, and ends whatever the scores', async () => {
    await checkLargeScores(decodeAttention24, open(), 3);
  });

  it('loses no weight where a score leaps beyond the range of f32', async () => {
    await checkLeaps(decodeAttention24, open(), 3);
  });

  it('shows a NaN and infinity in the rows that see them, and in no other', async () => {
    await checkNaNShows(decodeAttention24, open(), 3);
  });

  it('gives a key whose score is minus infinity no weight', async () => {
    await checkMinusInfinity(decodeAttention24, open(), 3);
  });

  // On CUDA it looks at the tables while the launch before it ends, and again in its turn.
  it('sees what was enqueued just before it', async () => {
    const device = open();
    const sizes = sizesOf({ keys: 'none', values: 'none' }, 128);
    const shape = [3, 10, 128] as const;
    const axes = ['token', 'queryHead', 'dim'] as const;
    for (let seed = 0; seed < 5; seed++) {
      const random = new Random(seed);
      const { mixed } = await randomCache24(device, random, sizes);
      const query = device.tensor('f16', axes, shape, random.elements('f16', 3 * 10 * 128));
      const stream = device.createStream();
      const attendOnce = () => {
        const output = device.tensor('f16', axes, shape);
        decodeAttention24(stream, { query, output, ...mixed, scale: 128 ** -0.5 });
        return output;
      };
      const dense = attendOnce();
      let ids = 0;
      const prunings = sizes.keyCounts.flatMap((heads, entry) =>
        heads.map((keys, kvHead): Pruning => {
          const endBlock = Math.floor(keys / blockTokens);
          const sparseIds = Array.from({ length: endBlock }, () => ids++);
          return { slot: 1 - entry, kvHead, firstBlock: 0, endBlock, sparseIds, freedFrom: 0 };
        }),
      );
      compress24(stream, { operand: 'keys', blocks: mixed.keys, prunings });
      const sparse = attendOnce();
      await stream.synchronize();
      const later = await attendOnce().read();
      expect(await sparse.read()).toEqual(later);
      expect(await dense.read()).not.toEqual(later);
    }
  });

  it('gives the same bits wherever the blocks lie', async () => {
    await checkPlaces(decodeAttention24, open(), sizesOf({ keys: 'all', values: 'some' }, 128));
  });

  it('refuses bad input with a typed error', async () => {
    await checkRefusals24(decodeAttention24, open(), new Random(7));
  });
});
