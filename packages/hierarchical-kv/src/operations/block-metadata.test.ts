import { DTypeError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, encode, expectRefusals, Random, unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { blockMetadataMethods, metadataVectors } from '../block-metadata-method.js';
import { filledWith, placeSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { blockMetadata } from './block-metadata.js';

const untouched = -77;

/** The vectors of a dim, by the definition. */
function vectorsOf(method: string, keys: readonly number[]): number[] {
  const [least, most] = [Math.min(...keys), Math.max(...keys)];
  const mean = (numbers: readonly number[]) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
  if (method === 'mean') return [mean(keys)];
  if (method === 'minMax') return [least, most];
  const mid = (least + most) / 2;
  const half = mean(keys.map((key) => Math.abs(key - mid)));
  return [mid - half, mid + half];
}

describeOnDevices('blockMetadata', ({ open }) => {
  it.each(['f32', 'f16', 'bf16'] as const)('describes the blocks of %s that rows filled, and no other', async (dtype) => {
    const device = open();
    const stream = device.createStream();
    for (const [seed, method] of blockMetadataMethods.entries()) {
      const random = new Random(seed);
      const [headDim, blockTokens, width] = [random.pick([1, 40, 128]), random.pick([8, 32]), 5];
      const sequences = randomSequences(random, { kvHeads: 2, blockTokens, width, slotCount: 3, mostRows: 70 });
      const blocks = sequences.table.length;
      const numbers = decode(dtype, random.elements(dtype, blocks * blockTokens * (headDim + 1)));
      // One dim more than is used, so that strides are not those of the shape.
      const keys = device.tensor(dtype, ['block', 'blockToken', 'dim'], [blocks, blockTokens, headDim + 1], encode(dtype, numbers));
      const vectors = metadataVectors(method);
      const metadataTable = random.permutation(blocks);
      const metadata = device.tensor(
        dtype,
        ['metadataBlock', 'vector', 'dim'],
        [blocks, vectors, headDim],
        encode(dtype, new Float64Array(blocks * vectors * headDim).fill(untouched)),
      );
      const batch = placeSequences(device, sequences);
      blockMetadata(stream, {
        ...batch,
        keys: keys.slice('dim', 0, headDim),
        metadataTable: device.tensor('i32', ['slot', 'kvHead', 'block'], batch.blockTable.shape, metadataTable),
        metadata,
        rows: 3 * 70,
        method,
      });
      const found = decode(dtype, await metadata.read(stream));
      const wanted = new Float64Array(found.length).fill(untouched);
      let filled = 0;
      sequences.slots.forEach((slot, entry) => {
        for (let head = slot * 2; head < slot * 2 + 2; head++) {
          const tokens = sequences.counts[head] ?? NaN;
          const rows = sequences.rows[entry] ?? NaN;
          for (let block = 0; (block + 1) * blockTokens <= tokens; block++) {
            if ((block + 1) * blockTokens <= tokens - rows) continue;
            filled++;
            const [from = NaN, to = NaN] = [sequences.table[head * width + block], metadataTable[head * width + block]];
            for (let dim = 0; dim < headDim; dim++) {
              const own = Array.from({ length: blockTokens }, (_, token) => numbers[(from * blockTokens + token) * (headDim + 1) + dim] ?? NaN);
              vectorsOf(method, own).forEach((number, vector) => (wanted[(to * vectors + vector) * headDim + dim] = number));
            }
          }
        }
      });
      expect(filled).toBeGreaterThan(0);
      found.forEach((number, index) => {
        const exact = wanted[index] ?? NaN;
        // Rounded once to the dtype. Before, 32 numbers below 6 are summed in f32 and divided by 32, and two such are added.
        const rounding = unitRoundoff[dtype] * Math.abs(exact) + 36 * 6 * 2 ** -24;
        if (Math.abs(number - exact) > rounding) expect(number, `${method} ${index}`).toBe(exact);
      });
    }
  });

  it('keeps a key that is not a number in its block and dim', async () => {
    const device = open();
    const stream = device.createStream();
    const keys = device.tensor('f32', ['block', 'blockToken', 'dim'], [2, 2, 2], Float32Array.of(1, NaN, 1, 1, 1, 1, 1, 1));
    const table = device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, 2], Int32Array.of(0, 1));
    const metadata = device.tensor('f32', ['metadataBlock', 'vector', 'dim'], [2, 1, 2]);
    blockMetadata(stream, {
      ...{ keys, blockTable: table, metadataTable: table, metadata, rows: 4, method: 'mean' },
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(4)),
      slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 4)),
    });
    expect(Array.from(await metadata.read(stream))).toEqual([1, NaN, 1, 1]);
  });

  const good = () => {
    const device = open();
    const sequences = randomSequences(new Random(1), { kvHeads: 2, blockTokens: 4, width: 3, slotCount: 2, mostRows: 0 });
    const batch = placeSequences(device, {
      ...sequences,
      counts: new Int32Array(4).fill(12),
      slots: Int32Array.of(1),
      queryStart: Int32Array.of(0, 12),
    });
    return {
      ...batch,
      keys: device.tensor('f16', ['block', 'blockToken', 'dim'], [12, 4, 8]),
      metadataTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [2, 2, 3], sequences.table),
      metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 2, 8]),
      rows: 12,
      method: 'minMax' as const,
    };
  };

  it.each([...spoiltSequences, ['has no place for metadata', 'metadataTable', 12] as const])('refuses a batch that %s', async (_, name, number) => {
    const args = good();
    const stream = args.keys.device.createStream();
    blockMetadata(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuses bad input with a typed error', async () => {
    const args = good();
    const { device } = args.keys;
    const stream = device.createStream();
    expectRefusals(blockMetadata, stream, args, [
      [{ method: 'means' }, InvalidValueError],
      [{ method: 'mean' as const }, ShapeError],
      [{ rows: -1 }, InvalidValueError],
      [{ values: device.tensor('f16', ['block', 'blockToken', 'dim'], [12, 4, 8]) }, InvalidValueError],
      [{ checksums: device.tensor('i32', ['metadataBlock'], [11]) }, ShapeError],
      [{ metadata: device.tensor('bf16', ['metadataBlock', 'vector', 'dim'], [12, 2, 8]) }, DTypeError],
      [{ metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 2, 9]) }, ShapeError],
      [{ metadataTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [2, 2, 4]) }, ShapeError],
    ]);
    blockMetadata(stream, args);
    await stream.synchronize();
  });
});
