import { CapabilityError, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { codedBlockBytes } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';
import { nearestCodes, PooledBlock } from '../testing/coded-keys-oracle.js';
import { type BookSizes, placedCodebooks } from '../testing/placed-codebooks.js';
import { encodeKeys } from './encode-keys.js';

const axes = ['block', 'blockToken', 'dim'] as const;
const dtypes = ['f32', 'f16', 'bf16'] as const;

const shapes: readonly BookSizes[] = [
  { kvHeads: 2, headDim: 128, groups: 64, centroids: 256 },
  { kvHeads: 1, headDim: 128, groups: 32, centroids: 100, scaled: true },
  { kvHeads: 2, headDim: 64, groups: 32, centroids: 517, scaled: true },
  { kvHeads: 3, headDim: 64, groups: 16, centroids: 64 },
  { kvHeads: 1, headDim: 64, groups: 8, centroids: 33 },
  { kvHeads: 2, headDim: 96, groups: 24, centroids: 31, separate: true },
  { kvHeads: 2, headDim: 80, groups: 40, centroids: 40, separate: true, scaled: true },
  { kvHeads: 1, headDim: 14, groups: 7, centroids: 5 },
  { kvHeads: 1, headDim: 15, groups: 5, centroids: 9 },
  { kvHeads: 1, headDim: 20, groups: 20, centroids: 200 },
  { kvHeads: 1, headDim: 7, groups: 1, centroids: 2 },
  { kvHeads: 1, headDim: 2, groups: 1, centroids: 3 },
];

describeOnDevices('encodeKeys', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  const codedPool = (blocks: number, groups: number, codeBits: number) => {
    const bytes = codedBlockBytes(groups, codeBits);
    return device.tensor('u8', ['codedBlock', 'byte'], [blocks, bytes], new Uint8Array(blocks * bytes).fill(0xa5));
  };

  it.each(shapes)('writes the nearest centroid of each sub-vector, and no other block ($headDim dims, $groups groups, $centroids centroids)', async (sizes) => {
    const random = new Random(sizes.headDim + sizes.groups);
    const { placed, oracle } = await placedCodebooks(stream, random, sizes);
    for (const dtype of dtypes) {
      for (const codeBits of [placed.codeBits, 16]) {
        const length = blockTokens * sizes.headDim;
        // Here and there far outside of all centroids.
        const numbers = Float64Array.from({ length: 3 * length }, () => random.normal() * (random.next() < 0.01 ? 100 : 1));
        const keys = device.tensor(dtype, axes, [3, blockTokens, sizes.headDim], encode(dtype, numbers));
        const codedKeys = codedPool(4, sizes.groups, codeBits);
        const [from, to] = [[2, 0], [1, 3]];
        const kvHeads = to.map(() => random.integer(0, sizes.kvHeads - 1));
        encodeKeys(stream, { ...placed, codeBits, codedKeys, keys, from, to, kvHeads });
        const stored = decode(dtype, encode(dtype, numbers));
        const bytes = codedBlockBytes(sizes.groups, codeBits);
        const wanted = new Uint8Array(4 * bytes).fill(0xa5);
        to.forEach((target, copy) => {
          const rows = stored.slice((from[copy] ?? NaN) * length, ((from[copy] ?? NaN) + 1) * length);
          const books = oracle[kvHeads[copy] ?? NaN];
          if (books === undefined) throw new Error('there is no such kv head');
          new PooledBlock(wanted, target, sizes.groups, codeBits).write(nearestCodes(rows, books), sizes.groups, codeBits);
        });
        expect(await codedKeys.read()).toEqual(wanted);
      }
    }
  });

  it('takes the lowest of equally near centroids, and of equal ones', async () => {
    const random = new Random(1);
    for (const subDim of [1, 2, 4]) {
      const sizes = { kvHeads: 1, headDim: 32 * subDim, groups: 32, centroids: 300 };
      // Small integers, so that many are equal and many sub-vectors are halfway between two.
      const centroids = encode('f16', Float64Array.from({ length: 300 * subDim }, () => random.integer(-3, 3)));
      const { placed, oracle } = await placedCodebooks(stream, random, sizes, centroids);
      const numbers = Float64Array.from({ length: blockTokens * sizes.headDim }, () => random.integer(-8, 8) / 2);
      const keys = device.tensor('f16', axes, [1, blockTokens, sizes.headDim], encode('f16', numbers));
      const codedKeys = codedPool(1, 32, placed.codeBits);
      encodeKeys(stream, { ...placed, codedKeys, keys, from: [0], to: [0], kvHeads: [0] });
      const [books] = oracle;
      if (books === undefined) throw new Error('there is one kv head');
      const wanted = new Uint8Array(codedKeys.byteLength);
      new PooledBlock(wanted, 0, 32, placed.codeBits).write(nearestCodes(numbers, books), 32, placed.codeBits);
      expect(await codedKeys.read()).toEqual(wanted);
    }
  });

  it('gives code 0 to what is near to no centroid, and marks its token, no other', async () => {
    const sizes = { kvHeads: 1, headDim: 64, groups: 32, centroids: 64 };
    const { placed, oracle } = await placedCodebooks(stream, new Random(2), sizes);
    const numbers = Float64Array.from({ length: blockTokens * 64 }, (_, index) => Math.sin(index));
    const odd = [0, 31, 32, 63];
    [NaN, Infinity, -Infinity, 3e38].forEach((x, index) => (numbers[(odd[index] ?? NaN) * 64 + 5] = x));
    const keys = device.tensor('f32', axes, [1, blockTokens, 64], encode('f32', numbers));
    const codedKeys = codedPool(1, 32, placed.codeBits);
    encodeKeys(stream, { ...placed, codedKeys, keys, from: [0], to: [0], kvHeads: [0] });
    const [books] = oracle;
    if (books === undefined) throw new Error('there is one kv head');
    const codes = nearestCodes(decode('f32', encode('f32', numbers)), books);
    expect(codes.filter((code) => code < 0)).toHaveLength(4);
    const wanted = new Uint8Array(codedKeys.byteLength);
    const block = new PooledBlock(wanted, 0, 32, placed.codeBits);
    block.write(codes, 32, placed.codeBits);
    expect(Array.from({ length: blockTokens }, (_, token) => block.isSpoilt(token) && token).filter((token) => token !== false)).toEqual(odd);
    expect(await codedKeys.read()).toEqual(wanted);
    // The next keys of the block are sound again.
    const sound = device.tensor('f32', axes, [1, blockTokens, 64], encode('f32', numbers.map((_, index) => Math.cos(index))));
    encodeKeys(stream, { ...placed, codedKeys, keys: sound, from: [0], to: [0], kvHeads: [0] });
    expect(new PooledBlock(await codedKeys.read(), 0, 32, placed.codeBits).spoilt).toEqual(new Uint8Array(8));
  });

  it.each([
    { subDim: 2, centroids: 100, levels: 6 },
    { subDim: 4, centroids: 100, levels: 6 },
    { subDim: 4, centroids: 300, levels: 8 },
    { subDim: 8, centroids: 300, levels: 6 },
  ])('stays inside its memory whatever an index holds (sub-vectors of $subDim dims, $centroids centroids)', async ({ subDim, centroids, levels }) => {
    const random = new Random(3);
    const sizes = { kvHeads: 1, headDim: 32 * subDim, groups: 32, centroids };
    const { placed } = await placedCodebooks(stream, random, sizes);
    const keys = device.tensor('f16', axes, [1, blockTokens, sizes.headDim], random.elements('f16', blockTokens * sizes.headDim));
    const codedKeys = codedPool(1, 32, placed.codeBits);
    for (let round = 0; round < 20; round++) {
      const bytes = Uint8Array.from({ length: placed.index.byteLength }, () => random.integer(0, 255));
      // A box that holds all, and as many levels as there can be.
      new Float32Array(bytes.buffer, 4, 8).set([-100, -100, -100, -100, 100, 100, 100, 100]);
      new Int32Array(bytes.buffer, 0, 1).set([round < 10 ? levels : random.integer(-1, 40)]);
      stream.write(placed.index, bytes);
      encodeKeys(stream, { ...placed, codedKeys, keys, from: [0], to: [0], kvHeads: [0] });
      await stream.synchronize();
    }
  });

  it('refuses bad input with a typed error, and writes nothing', async () => {
    const sizes = { kvHeads: 2, headDim: 64, groups: 32, centroids: 100 };
    const { placed } = await placedCodebooks(stream, new Random(4), sizes);
    const keys = device.tensor('f16', axes, [2, blockTokens, 64]);
    const codedKeys = codedPool(3, 32, placed.codeBits);
    const good = { ...placed, codedKeys, keys, from: [0, 1], to: [2, 0], kvHeads: [0, 1] };
    expectRefusals(encodeKeys, stream, good, [
      ...[-1, 2, 0.5, NaN].map((number) => [{ from: [0, number] }, InvalidValueError] as const),
      ...[-1, 3, 0.5, NaN].map((number) => [{ to: [0, number] }, InvalidValueError] as const),
      ...[-1, 2, 0.5, NaN].map((number) => [{ kvHeads: [0, number] }, InvalidValueError] as const),
      [{ to: [1, 1] }, InvalidValueError],
      [{ from: [0] }, ShapeError],
      [{ kvHeads: [0] }, ShapeError],
      [{ codeBits: 6 }, ShapeError],
      [{ codeBits: 17 }, CapabilityError],
      [{ keys: device.tensor('f16', axes, [2, 32, 64]) }, ShapeError],
      [{ keys: device.tensor('f16', axes, [2, blockTokens, 63]) }, InvalidValueError],
      [{ keys: codedKeys }, DTypeError],
      [{ index: device.tensor('u8', ['kvHead', 'book', 'byte'], [2, 1, 48]) }, ShapeError],
      [{ centroids: device.tensor('f16', ['kvHead', 'book', 'centroid', 'subDim'], [2, 3, 100, 2]) }, ShapeError],
      [{ channelScale: device.tensor('f32', ['kvHead', 'dim'], [2, 32]) }, ShapeError],
    ]);
    const untouched = await codedKeys.read(stream);
    expect(untouched.every((byte) => byte === 0xa5)).toBe(true);
  });
});
