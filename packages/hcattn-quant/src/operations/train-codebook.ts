import { CapabilityError, type FloatDType, ShapeError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { expectBoolean, expectThat, floats, loadAddon, operation, type TensorRule } from '@kv/sparse-core/native';
import { expectSizes } from '../codebooks/codebooks.js';

export interface TrainCodebookArguments {
  /** `[kvHead, token, dim]`, after RoPE, heads of 1 to 512 dims. */
  readonly keys: TensorHandle<FloatDType, readonly ['kvHead', 'token', 'dim']>;
  /** f32 `[kvHead, dim]`: what keys are divided by. The first iteration writes it. */
  readonly scale: TensorHandle<'f32', readonly ['kvHead', 'dim']>;
  /** f32 `[kvHead, book, centroid, subDim]`, with one book a kv head, or `dim / subDim`: one for each group. */
  readonly means: TensorHandle<'f32', readonly ['kvHead', 'book', 'centroid', 'subDim']>;
  /** f16, the shape of `means`: the means as they are now, rounded to the nearest. */
  readonly rounded: TensorHandle<'f16', readonly ['kvHead', 'book', 'centroid', 'subDim']>;
  /** i32 `[kvHead, book, centroid]`: vectors that each mean is the mean of. */
  readonly counts: TensorHandle<'i32', readonly ['kvHead', 'book', 'centroid']>;
  /** Whether scales are the root mean square of each channel; they are 1 otherwise. */
  readonly channelScale: boolean;
  /** A whole number from 0 to 2^53 - 1. */
  readonly seed: number;
  /** Vectors of an iteration, drawn at random. */
  readonly batchVectors: number;
  /** How many iterations there were. 0 begins anew; the others go on with what `scale`, `means` and `counts` hold. */
  readonly firstIteration: number;
  /** How many this call makes. */
  readonly iterations: number;
}

const books = ['kvHead', 'book', 'centroid', 'subDim'] as const;
const rules = [
  { name: 'keys', dtype: floats, shape: ['kvHead', 'token', 'dim'], layout: 'rows' },
  { name: 'scale', dtype: ['f32'], shape: ['kvHead', 'dim'], layout: 'contiguous' },
  { name: 'means', dtype: ['f32'], shape: books, layout: 'contiguous' },
  { name: 'rounded', dtype: ['f16'], shape: books, layout: 'contiguous' },
  { name: 'counts', dtype: ['i32'], shape: ['kvHead', 'book', 'centroid'], layout: 'contiguous' },
] as const satisfies readonly TensorRule[];

const enqueue = operation('trainCodebook', rules, ['scale', 'means', 'rounded', 'counts']);

/** Vectors that all iterations together may have: counts are i32. */
const mostVectors = 2 ** 31 - 1;

/**
 * Some iterations of mini-batch k-means over the sub-vectors of keys, for every codebook of a layer:
 *
 *     mean_c = (n_c mean_c + sum of X_c) / (n_c + |X_c|);   n_c += |X_c|
 *
 * X_c are those of a random batch whose nearest mean is mean_c. The first iteration begins with k-means++ on a sample of
 * 32,768 vectors, or four for each centroid; means without a vector move to far ones. The same keys, settings and seed
 * give the same bits, whatever the number of threads and however the iterations are divided into calls. A key with a number
 * that is not finite fails the stream with an InvalidValueError.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws CapabilityError on a device other than the CPU
 * @throws InvalidValueError for settings out of range
 */
export function trainCodebook(stream: Stream, args: TrainCodebookArguments): void {
  enqueue(stream, args, (natives, [{ shape: keys }, , { shape: means }]) => {
    const [, tokens, headDim] = keys;
    const [, books, centroids, subDim] = means;
    const { channelScale, seed, batchVectors, firstIteration, iterations } = args;
    if (stream.device.kind !== 'cpu') {
      throw new CapabilityError('trainCodebook: codebooks are trained on a CPU device; copy the keys to one.', {
        subject: 'stream',
        given: stream.device.name,
        wanted: 'cpu',
      });
    }
    const groups = headDim / subDim;
    expectSizes('trainCodebook', { headDim, groups, centroids });
    if (tokens === 0 || (books !== 1 && books !== groups)) {
      const given = tokens === 0 ? 'no keys' : `${books} books`;
      throw new ShapeError(`trainCodebook: there are ${given}; give keys, and 1 or ${groups} books of a kv head.`, {
        subject: tokens === 0 ? 'keys' : 'means',
        given: tokens === 0 ? keys : means,
      });
    }
    expectBoolean('trainCodebook', 'channelScale', channelScale);
    const expectCount = (name: string, given: unknown, least: number, most: number) =>
      expectThat('trainCodebook', name, given, Number.isSafeInteger(given) && (given as number) >= least && (given as number) <= most, `a whole number from ${least} to ${most}`);
    expectCount('seed', seed, 0, Number.MAX_SAFE_INTEGER);
    expectCount('batchVectors', batchVectors, 1, mostVectors);
    expectCount('firstIteration', firstIteration, 0, Math.floor(mostVectors / batchVectors));
    expectCount('iterations', iterations, 0, Math.floor(mostVectors / batchVectors) - firstIteration);
    loadAddon().trainCodebook(stream.native, ...natives, channelScale, seed, batchVectors, firstIteration, iterations);
  });
}
