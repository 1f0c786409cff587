import { DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { codedBlockBytes } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';
import { decodedKeys, PooledBlock, unpacked } from '../testing/coded-keys-oracle.js';
import { type BookSizes, placedCodebooks } from '../testing/placed-codebooks.js';
import { decodeKeys } from './decode-keys.js';
import { encodeKeys } from './encode-keys.js';

const axes = ['block', 'blockToken', 'dim'] as const;
const dtypes = ['f32', 'f16', 'bf16'] as const;

const shapes: readonly BookSizes[] = [
  { kvHeads: 2, headDim: 128, groups: 64, centroids: 8192 },
  { kvHeads: 1, headDim: 64, groups: 16, centroids: 300, scaled: true },
  { kvHeads: 2, headDim: 96, groups: 24, centroids: 31, separate: true },
  { kvHeads: 1, headDim: 15, groups: 5, centroids: 9, scaled: true },
  { kvHeads: 1, headDim: 7, groups: 7, centroids: 2 },
  { kvHeads: 1, headDim: 512, groups: 128, centroids: 16 },
];

describeOnDevices('decodeKeys', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  it.each(shapes)('writes what any codes stand for, bit for bit, NaN for spoilt tokens, and no other block ($headDim dims, $groups groups)', async (sizes) => {
    const random = new Random(sizes.headDim);
    const { placed, oracle } = await placedCodebooks(stream, random, sizes);
    for (const dtype of dtypes) {
      for (const codeBits of [placed.codeBits, 16]) {
        const bytes = codedBlockBytes(sizes.groups, codeBits);
        const contents = Uint8Array.from({ length: 3 * bytes }, () => random.integer(0, 255));
        const codedKeys = device.tensor('u8', ['codedBlock', 'byte'], [3, bytes], contents);
        const length = blockTokens * sizes.headDim;
        const keys = device.tensor(dtype, axes, [4, blockTokens, sizes.headDim], encode(dtype, new Float64Array(4 * length)));
        const [from, to] = [[2, 0, 2], [1, 3, 0]];
        const kvHeads = to.map(() => random.integer(0, sizes.kvHeads - 1));
        decodeKeys(stream, { ...placed, codeBits, codedKeys, keys, from, to, kvHeads });
        const wanted = new Float64Array(4 * length);
        to.forEach((target, copy) => {
          const source = from[copy] ?? NaN;
          const block = new PooledBlock(contents, source, sizes.groups, codeBits);
          const books = oracle[kvHeads[copy] ?? NaN];
          if (books === undefined) throw new Error('there is no such kv head');
          const rows = decodedKeys(unpacked(block.codes, sizes.groups, codeBits), books);
          wanted.set(rows.map((x, index) => (block.isSpoilt(Math.floor(index / sizes.headDim)) ? NaN : x)), target * length);
        });
        expect(decode(dtype, await keys.read())).toEqual(decode(dtype, encode(dtype, wanted)));
      }
    }
  });

  it('gives back keys that have a centroid for each sub-vector', async () => {
    const random = new Random(2);
    for (const subDim of [1, 2, 4]) {
      const sizes = { kvHeads: 1, headDim: 32 * subDim, groups: 32, centroids: 100 };
      const { placed, oracle } = await placedCodebooks(stream, random, sizes);
      const [books] = oracle;
      if (books === undefined) throw new Error('there is one kv head');
      const chosen = Uint16Array.from({ length: blockTokens * 32 }, () => random.integer(0, 99));
      const numbers = encode('f16', decodedKeys(chosen, books));
      const keys = device.tensor('f16', axes, [2, blockTokens, sizes.headDim], new Uint16Array([...numbers, ...numbers.map(() => 0)]));
      const codedKeys = device.tensor('u8', ['codedBlock', 'byte'], [1, codedBlockBytes(32, 7)]);
      const coded = { ...placed, codedKeys, keys, kvHeads: [0] };
      encodeKeys(stream, { ...coded, from: [0], to: [0] });
      decodeKeys(stream, { ...coded, from: [0], to: [1] });
      const both = decode('f16', await keys.read());
      expect(both.slice(both.length / 2)).toEqual(both.slice(0, both.length / 2));
    }
  });

  it('refuses bad input with a typed error, and writes nothing', async () => {
    const sizes = { kvHeads: 2, headDim: 64, groups: 32, centroids: 100 };
    const { placed } = await placedCodebooks(stream, new Random(4), sizes);
    const keys = device.tensor('f16', axes, [3, blockTokens, 64], new Uint16Array(3 * blockTokens * 64));
    const codedKeys = device.tensor('u8', ['codedBlock', 'byte'], [2, codedBlockBytes(32, 7)]);
    const good = { ...placed, codedKeys, keys, from: [0, 1], to: [2, 0], kvHeads: [0, 1] };
    expectRefusals(decodeKeys, stream, good, [
      [{ from: [0, 2] }, InvalidValueError],
      [{ to: [0, 3] }, InvalidValueError],
      [{ kvHeads: [0, 2] }, InvalidValueError],
      [{ to: [1, 1] }, InvalidValueError],
      [{ kvHeads: [] }, ShapeError],
      [{ codeBits: 8 }, ShapeError],
      [{ keys: codedKeys }, DTypeError],
    ]);
    expect((await keys.read(stream)).every((bits) => bits === 0)).toBe(true);
  });
});
