import { CapabilityError, InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describeOnDevices, encode, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { centroidIndexBytes, indexCentroids } from './index-centroids.js';

const axes = ['kvHead', 'book', 'centroid', 'subDim'] as const;

describeOnDevices('indexCentroids', ({ open }) => {
  const device = open();
  const stream = device.createStream();

  async function indexOf(numbers: Float64Array, count: number, subDim: number): Promise<Uint8Array> {
    using centroids = await device.hostTensor('f16', axes, [1, 1, count, subDim]);
    using index = await device.hostTensor('u8', ['kvHead', 'book', 'byte'], [1, 1, centroidIndexBytes(count, subDim)]);
    stream.write(centroids, encode('f16', numbers));
    indexCentroids(stream, { centroids, index });
    return await index.read(stream);
  }

  it('lists leaf after leaf in few chunks', async () => {
    const random = new Random(1);
    // Lists of one and two dims have hardly more than one chunk.
    for (const [subDim, most] of [
      [1, 1.1],
      [2, 1.6],
      [3, 4],
      [4, 8],
    ] as const) {
      const bytes = await indexOf(Float64Array.from({ length: 1024 * subDim }, () => random.normal()), 1024, subDim);
      const levels = new Int32Array(bytes.buffer, bytes.byteOffset, 1)[0] ?? NaN;
      // Of one dim, some are equal.
      expect(levels).toBe(subDim === 1 ? 9 : 10);
      const starts = new Uint16Array(bytes.buffer, bytes.byteOffset + 48 + 4 * 1024, 2 ** levels);
      const chunks = new Uint16Array(bytes.buffer, bytes.byteOffset + 48 + 6 * 1024);
      let all = 0;
      for (const start of starts) {
        expect(start).toBe(all);
        // The sign of its last number says that a chunk ends a list.
        do all++;
        while ((chunks[8 * all - 1] ?? NaN) < 0x8000);
      }
      expect(all / starts.length).toBeLessThanOrEqual(most);
    }
  });

  it('makes the same bytes on one thread and on three', async () => {
    const numbers = Float64Array.from({ length: 4 * 200 }, (_, index) => Math.sin(index));
    const made = [];
    for (const threads of [1, 3]) {
      const own = open(threads);
      const queue = own.createStream();
      using centroids = await own.hostTensor('f16', axes, [2, 1, 200, 2]);
      using index = await own.hostTensor('u8', ['kvHead', 'book', 'byte'], [2, 1, centroidIndexBytes(200, 2)]);
      queue.write(centroids, encode('f16', numbers));
      indexCentroids(queue, { centroids, index });
      made.push(await index.read(queue));
    }
    expect(made[1]).toEqual(made[0]);
  });

  it('is built of centroids that are all equal, and of one', async () => {
    await expect(indexOf(new Float64Array(2 * 500), 500, 2)).resolves.toHaveLength(centroidIndexBytes(500, 2));
    await expect(indexOf(Float64Array.of(1), 1, 1)).resolves.toHaveLength(centroidIndexBytes(1, 1));
  });

  it('refuses bad input with a typed error', async () => {
    const own = open();
    const queue = own.createStream();
    using centroids = await own.hostTensor('f16', axes, [1, 1, 100, 2]);
    using index = await own.hostTensor('u8', ['kvHead', 'book', 'byte'], [1, 1, 48]);
    expect(() => {
      indexCentroids(queue, { centroids, index });
    }).toThrow(ShapeError);
    expect(() => centroidIndexBytes(8193, 2)).toThrow(CapabilityError);
    expect(() => centroidIndexBytes(0, 2)).toThrow(CapabilityError);
    await expect(indexOf(Float64Array.of(1, NaN), 1, 2)).rejects.toThrow(InvalidValueError);
  });
});
