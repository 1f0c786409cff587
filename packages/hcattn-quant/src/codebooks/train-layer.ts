import { type FloatDType, InvalidValueError, type TensorHandle } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';
import { trainCodebook } from '../operations/train-codebook.js';
import type { Codebooks, LayerCodebooks } from './codebooks.js';

/** What codebooks are to be, and how they are made. */
export interface TrainingSettings extends Pick<Codebooks, 'groups' | 'books' | 'centroids'> {
  readonly channelScale: boolean;
  readonly seed: number;
  readonly iterations: number;
  readonly batchVectors: number;
}

export interface TrainingHooks {
  readonly signal?: AbortSignal | undefined;
  /** Called with the iterations that are done. */
  readonly onProgress?: ((iterations: number) => void) | undefined;
}

/** Fewer vectors a centroid than this make poor codebooks: the rule of FAISS. */
const leastVectors = 39;
/** Iterations of one call, after which a signal is asked, times books: some hundredths of a second on each of two threads. */
const booksOfCall = 10;

/**
 * Refuses to train on too few keys.
 * @throws InvalidValueError that counts them
 */
export function expectEnoughKeys(keys: number, { groups, books, centroids }: TrainingSettings): void {
  const vectors = (keys * groups) / books;
  if (vectors >= leastVectors * centroids) return;
  const wanted = Math.ceil((leastVectors * centroids * books) / groups);
  const most = Math.floor(vectors / leastVectors);
  throw new InvalidValueError(
    `${keys} keys of a head give ${vectors} vectors for a codebook of ${centroids} centroids, ${(vectors / centroids).toFixed(1)} for each; ` +
      `${leastVectors} are wanted. Give texts of ${wanted} tokens or more${most >= 2 ? `, or ask for ${most} centroids or fewer` : ''}.`,
    { subject: 'keys', given: vectors, wanted: leastVectors * centroids },
  );
}

/**
 * Trains the codebooks of one layer on the device's workers, off the JavaScript thread.
 * @param keys `[kvHead, token, dim]` on a CPU device, after RoPE
 * @throws InvalidValueError for settings out of range, or keys with a number that is not finite
 * @throws the signal's reason when it is aborted, within some iterations
 */
export async function trainLayer(
  keys: TensorHandle<FloatDType, readonly ['kvHead', 'token', 'dim']>,
  { groups, books, centroids, channelScale, seed, iterations, batchVectors }: TrainingSettings,
  { signal, onProgress }: TrainingHooks,
): Promise<LayerCodebooks> {
  const { device } = keys;
  const [kvHeads, , headDim] = keys.shape;
  const axes = ['kvHead', 'book', 'centroid', 'subDim'] as const;
  const shape = [kvHeads, books, centroids, headDim / groups] as const;
  const tensors = madeTogether((own) => ({
    scale: own(device.tensor('f32', ['kvHead', 'dim'], [kvHeads, headDim])),
    means: own(device.tensor('f32', axes, shape)),
    rounded: own(device.tensor('f16', axes, shape)),
    counts: own(device.tensor('i32', ['kvHead', 'book', 'centroid'], [kvHeads, books, centroids])),
    stream: own(device.createStream()),
  }));
  const { stream } = tensors;
  const iterationsOfCall = Math.max(1, Math.floor(booksOfCall / (kvHeads * books)));
  try {
    for (let firstIteration = 0; firstIteration < iterations; firstIteration += iterationsOfCall) {
      signal?.throwIfAborted();
      const ofCall = Math.min(iterationsOfCall, iterations - firstIteration);
      trainCodebook(stream, { ...tensors, keys, channelScale, seed, batchVectors, firstIteration, iterations: ofCall });
      await stream.synchronize();
      onProgress?.(firstIteration + ofCall);
    }
    signal?.throwIfAborted();
    return { kvHeads, centroids: await tensors.rounded.read(), scale: await tensors.scale.read() };
  } finally {
    for (const each of Object.values(tensors)) each[Symbol.dispose]();
  }
}
