import { InvalidValueError, ShapeError } from '@kv/sparse-core';
import { decode, describeOnDevices, expectRefusals, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { filledWith, placeSequences, randomSequences, spoiltSequences } from '../testing/random-sequences.js';
import { blockScores } from './block-scores.js';

const untouched = -77;

/** Sums in the order that every device keeps: lanes of chunks of 8, then lanes in pairs. */
function summed(products: readonly number[]): number {
  const lanes = new Float32Array(32);
  products.forEach((product, index) => {
    const lane = Math.floor(index / 8) % 32;
    lanes[lane] = (lanes[lane] ?? NaN) + Math.fround(product);
  });
  for (let distance = 16; distance >= 1; distance /= 2) {
    for (let lane = 0; lane < distance; lane++) lanes[lane] = (lanes[lane] ?? NaN) + (lanes[lane + distance] ?? NaN);
  }
  return lanes[0] ?? NaN;
}

describeOnDevices('blockScores', ({ open }) => {
  it.each([
    [{ query: 'f16', metadata: 'f16' }, { dim: 128, vectors: 2, group: 4 }],
    [{ query: 'f16', metadata: 'f16' }, { dim: 128, vectors: 2, group: 1 }],
    [{ query: 'f16', metadata: 'f16' }, { dim: 128, vectors: 1, group: 6 }],
    [{ query: 'bf16', metadata: 'bf16' }, { dim: 64, vectors: 2, group: 8 }],
    [{ query: 'bf16', metadata: 'f16' }, { dim: 64, vectors: 1, group: 2 }],
    [{ query: 'f32', metadata: 'f32' }, { dim: 40, vectors: 2, group: 3 }],
    [{ query: 'f32', metadata: 'bf16' }, { dim: 300, vectors: 2, group: 2 }],
  ] as const)('of %j, %j, are the definition to the last bit', async (dtypes, { dim, vectors, group }) => {
    const device = open();
    const stream = device.createStream();
    const random = new Random(dim * vectors + group);
    const [kvHeads, width, blockTokens] = [2, 21, 4];
    const sequences = randomSequences(random, { kvHeads, blockTokens, width, slotCount: 3, mostRows: 2 });
    const blocks = sequences.table.length;
    const tokens = (sequences.queryStart.at(-1) ?? NaN) + 1;
    const stored = {
      query: random.elements(dtypes.query, tokens * kvHeads * group * dim),
      metadata: random.elements(dtypes.metadata, blocks * vectors * dim),
    };
    const [query, metadata] = [decode(dtypes.query, stored.query), decode(dtypes.metadata, stored.metadata)];
    const scores = device.tensor('f32', ['token', 'kvHead', 'block'], [tokens, kvHeads, width + 1], new Float32Array(tokens * kvHeads * (width + 1)).fill(untouched));
    blockScores(stream, {
      ...placeSequences(device, sequences),
      ...{ scores, blockTokens },
      query: device.tensor(dtypes.query, ['token', 'queryHead', 'dim'], [tokens, kvHeads * group, dim], stored.query),
      metadata: device.tensor(dtypes.metadata, ['metadataBlock', 'vector', 'dim'], [blocks, vectors, dim], stored.metadata),
    });
    const wanted = new Float32Array(tokens * kvHeads * (width + 1)).fill(untouched);
    sequences.slots.forEach((slot, entry) => {
      for (let token = sequences.queryStart[entry] ?? NaN; token < (sequences.queryStart[entry + 1] ?? NaN); token++) {
        for (let head = 0; head < kvHeads; head++) {
          const full = Math.floor((sequences.counts[slot * kvHeads + head] ?? NaN) / blockTokens);
          for (let block = 0; block < full; block++) {
            const number = sequences.table[(slot * kvHeads + head) * width + block] ?? NaN;
            const bounds = Array.from({ length: group }, (_, own) => {
              const q = query.subarray(((token * kvHeads + head) * group + own) * dim);
              return summed(
                Array.from({ length: vectors * dim }, (__, i) => {
                  const x = q[i % dim] ?? NaN;
                  const isRead = vectors === 1 || x < 0 === i < dim;
                  return isRead ? x * (metadata[number * vectors * dim + i] ?? NaN) : 0;
                }),
              );
            });
            wanted[(token * kvHeads + head) * (width + 1) + block] = Math.max(...bounds);
          }
        }
      }
    });
    expect(await scores.read(stream)).toEqual(wanted);
  });

  it('take the larger end of a box, and a query head that is not a number for none', async () => {
    const device = open();
    const stream = device.createStream();
    const scores = device.tensor('f32', ['token', 'kvHead', 'block'], [1, 1, 1]);
    blockScores(stream, {
      ...{ scores, blockTokens: 1 },
      query: device.tensor('f32', ['token', 'queryHead', 'dim'], [1, 2, 2], Float32Array.of(2, -3, NaN, 1)),
      metadata: device.tensor('f32', ['metadataBlock', 'vector', 'dim'], [1, 2, 2], Float32Array.of(-1, -2, 5, 7)),
      blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [1, 1, 1], Int32Array.of(0)),
      keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, 1], Int32Array.of(1)),
      slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
      queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 1)),
    });
    expect(Array.from(await scores.read(stream))).toEqual([2 * 5 + 3 * 2]);
  });

  const good = () => {
    const device = open();
    const sequences = randomSequences(new Random(1), { kvHeads: 2, blockTokens: 4, width: 3, slotCount: 2 });
    return {
      ...placeSequences(device, { ...sequences, counts: new Int32Array(4).fill(12), slots: Int32Array.of(1), queryStart: Int32Array.of(0, 1) }),
      query: device.tensor('f16', ['token', 'queryHead', 'dim'], [1, 4, 64]),
      scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, 2, 3]),
      metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 2, 64]),
      blockTokens: 4,
    };
  };

  it.each(spoiltSequences)('refuse a batch that %s', async (_, name, number) => {
    const args = good();
    const stream = args.query.device.createStream();
    blockScores(stream, { ...args, [name]: filledWith(args[name], number) });
    await expect(stream.synchronize()).rejects.toThrow(InvalidValueError);
  });

  it('refuse bad input with a typed error', async () => {
    const args = good();
    const { device } = args.query;
    const stream = device.createStream();
    expectRefusals(blockScores, stream, args, [
      [{ blockTokens: 0 }, InvalidValueError],
      [{ query: device.tensor('f16', ['token', 'queryHead', 'dim'], [1, 3, 64]) }, ShapeError],
      [{ query: device.tensor('f16', ['token', 'queryHead', 'dim'], [1, 4, 32]) }, ShapeError],
      [{ metadata: device.tensor('f16', ['metadataBlock', 'vector', 'dim'], [12, 3, 64]) }, InvalidValueError],
      [{ scores: device.tensor('f32', ['token', 'kvHead', 'block'], [1, 2, 2]) }, InvalidValueError],
    ]);
    blockScores(stream, args);
    await stream.synchronize();
  });
});
