import { CapabilityError, DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { type PoolSizes, testPools } from '../testing/test-pools-24.js';
import { pruned } from '../testing/sparse-oracle.js';
import { compress24 } from './compress-24.js';
import { decompress24 } from './decompress-24.js';

describeOnDevices('decompress24', ({ open }) => {
  it.each([
    { operand: 'keys', dtype: 'f16', headDim: 64 },
    { operand: 'keys', dtype: 'bf16', headDim: 128 },
    { operand: 'values', dtype: 'f16', headDim: 128 },
    { operand: 'values', dtype: 'bf16', headDim: 64 },
  ] as const)(
    'is the inverse of compress24 ($operand $dtype $headDim)',
    async ({ operand, dtype, headDim }) => {
      const device = open();
      const stream = device.createStream();
      // Every pattern of 16 bits, NaNs too.
      const random = new Random(1);
      const contents = Uint16Array.from({ length: 3 * 64 * headDim }, () => random.integer(0, 65535));
      const sizes: PoolSizes = { dtype, headDim, denseBlocks: 3, sparseBlocks: 5, table: [1, 1, 3] };
      const blocks = testPools(device, sizes, contents, Int32Array.of(0, 1, 2));
      const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds: [3, 0, 4], freedFrom: 0 };
      compress24(stream, { operand, blocks, prunings: [pruning] });
      const dense = device.tensor(
        dtype,
        ['block', 'blockToken', 'dim'],
        [4, 64, headDim],
        new Uint16Array(4 * 64 * headDim).fill(0x7e01),
      );
      decompress24(stream, { operand, sparse: blocks.sparse, ids: [4, 3, 0, 3], dense });
      const result = await dense.read();
      [2, 0, 1, 0].forEach((block, index) => {
        const part = (all: Uint16Array, at: number) => all.slice(at * 64 * headDim, (at + 1) * 64 * headDim);
        expect(part(result, index)).toEqual(pruned(operand, headDim, part(contents, block)));
      });
    },
  );

  it('writes to the places that it is given, and nothing else', async () => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(2);
    const contents = Uint16Array.from({ length: 3 * 64 * 64 }, () => random.integer(0, 65535));
    const sizes: PoolSizes = { dtype: 'f16', headDim: 64, denseBlocks: 3, sparseBlocks: 3, table: [1, 1, 3] };
    const blocks = testPools(device, sizes, contents, Int32Array.of(0, 1, 2));
    const pruning = { slot: 0, kvHead: 0, firstBlock: 0, endBlock: 3, sparseIds: [2, 0, 1], freedFrom: 0 };
    compress24(stream, { operand: 'values', blocks, prunings: [pruning] });
    const untouched = new Uint16Array(64 * 64).fill(0x7e01);
    const dense = device.tensor('f16', ['block', 'blockToken', 'dim'], [4, 64, 64], new Uint16Array(4 * 64 * 64).fill(0x7e01));
    decompress24(stream, { operand: 'values', sparse: blocks.sparse, ids: [1, 2], dense, places: [3, 0] });
    const result = await dense.read();
    const part = (all: Uint16Array, at: number) => all.slice(at * 64 * 64, (at + 1) * 64 * 64);
    expect(part(result, 3)).toEqual(pruned('values', 64, part(contents, 2)));
    expect(part(result, 0)).toEqual(pruned('values', 64, part(contents, 0)));
    for (const at of [1, 2]) expect(part(result, at)).toEqual(untouched);
  });

  it('refuses bad input with a typed error', async () => {
    const device = open();
    const stream = device.createStream();
    const sizes: PoolSizes = { dtype: 'f16', headDim: 64, denseBlocks: 1, sparseBlocks: 2, table: [1, 1, 1] };
    const { dense, sparse } = testPools(device, sizes, new Uint16Array(64 * 64), Int32Array.of(0));
    const axes = ['block', 'blockToken', 'dim'] as const;
    const good = { operand: 'keys', sparse, ids: [0], dense } as const;
    expect(() => decompress24(stream, { ...good, ids: [0, 1] })).toThrow(ShapeError);
    expect(() => decompress24(stream, { ...good, dense: device.tensor('bf16', axes, [1, 64, 64]) })).toThrow(
      DTypeError,
    );
    expect(() => decompress24(stream, { ...good, dense: device.tensor('f16', axes, [1, 64, 96]) })).toThrow(
      CapabilityError,
    );
    for (const id of [2, -1, 0.5, NaN, 2 ** 32]) {
      expect(() => decompress24(stream, { ...good, ids: [id] })).toThrow(InvalidValueError);
    }
    expect(() => decompress24(stream, { ...good, places: [] })).toThrow(ShapeError);
    for (const place of [1, -1, 0.5, NaN]) {
      expect(() => decompress24(stream, { ...good, places: [place] })).toThrow(InvalidValueError);
    }
    expect(() => decompress24(stream, { ...good, ids: [0, 1], places: [0, 0] })).toThrow(InvalidValueError);
    expect(() => decompress24(stream, { ...good, operand: 'value' as never })).toThrow(InvalidValueError);
    const inside = device.tensor('f16', ['element'], [64 * 64 + 1]).slice('element', 1, 64 * 64 + 1);
    decompress24(stream, { ...good, dense: inside.view(axes, [1, 64, 64]) });
    await expect(stream.synchronize()).rejects.toThrow(CapabilityError);
  });
});
