import { CapabilityError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { expectShape, loadAddon, operation, show } from '@kv/sparse-core/native';
import { mostCentroids } from '../codebooks/codebooks.js';

export interface IndexCentroidsArguments {
  /** f16 `[kvHead, book, centroid, subDim]` in host memory: up to 8192 finite centroids a book. */
  readonly centroids: TensorHandle<'f16', readonly ['kvHead', 'book', 'centroid', 'subDim']>;
  /** u8 `[kvHead, book, byte]` in host memory, `centroidIndexBytes(centroid, subDim)` bytes a book. */
  readonly index: TensorHandle<'u8', readonly ['kvHead', 'book', 'byte']>;
}

const headerBytes = 48;
const chunkBytes = 16;
/** Centroids of a leaf that has a box. */
const leafCentroids = 8;

/** Parts begin at multiples of 16 bytes. */
const whole = (bytes: number) => Math.ceil(bytes / 16) * 16;

/**
 * Bytes of the index of one book (`native/shared/coded-keys/centroid-index.h`): lists for up to four dims, boxes for up to
 * eight, and nothing for more.
 * @throws CapabilityError for no centroid, or more than 8192
 */
export function centroidIndexBytes(centroids: number, subDim: number): number {
  if (!Number.isInteger(centroids) || centroids < 1 || centroids > mostCentroids) {
    throw new CapabilityError(`Books of ${show(centroids)} centroids were asked for; they have 1 to ${mostCentroids}.`, {
      subject: 'centroids',
      given: centroids,
      wanted: mostCentroids,
    });
  }
  if (subDim > 8) return headerBytes + 16;
  if (subDim > 4) {
    const levels = Math.max(0, Math.ceil(Math.log2(centroids / leafCentroids)));
    return headerBytes + whole(4 * subDim * (2 ** (levels + 1) - 1)) + whole(2 * centroids) + whole(2 * centroids * subDim);
  }
  const leaves = 2 ** Math.floor(Math.log2(centroids));
  const chunks = Math.max(2, 2 ** (subDim - 1)) * centroids;
  return headerBytes + whole(4 * leaves) + whole(2 * leaves) + chunkBytes * chunks;
}

const rules = [
  { name: 'centroids', dtype: ['f16'], shape: ['kvHead', 'book', 'centroid', 'subDim'], layout: 'contiguous' },
  { name: 'index', dtype: ['u8'], shape: ['kvHead', 'book', 'indexByte'], layout: 'contiguous' },
] as const;

const enqueue = operation('indexCentroids', rules, ['index']);

/**
 * Makes the search structure that `encodeKeys` finds the nearest centroids with, once for each codebook. It runs on the
 * host's workers on every device, in the order of the stream: both tensors are in host memory.
 * @throws ShapeError, DTypeError, DisposedError
 * @throws DeviceError for tensors in a device's own memory
 * @throws CapabilityError for more than 8192 centroids; centroids that are not finite reject the stream's next wait with an
 * InvalidValueError
 */
export function indexCentroids(stream: Stream, args: IndexCentroidsArguments): void {
  enqueue(stream, args, (natives, [{ shape: books }, index]) => {
    expectShape('indexCentroids', 'index', index, [books[0], books[1], centroidIndexBytes(books[2], books[3])]);
    loadAddon().indexCentroids(stream.native, ...natives);
  });
}
