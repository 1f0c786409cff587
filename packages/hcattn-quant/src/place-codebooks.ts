import { InvalidValueError, type Stream, type Tensor } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';
import { type Codebooks, codeBitsOf, expectCodebooks } from './codebooks/codebooks.js';
import { centroidIndexBytes, indexCentroids } from './operations/index-centroids.js';

/** The codebooks of one layer on a device: what `encodeKeys`, `decodeKeys` and `codedKeyScores` take beside the blocks. */
export interface PlacedCodebooks {
  readonly centroids: Tensor<'f16', readonly ['kvHead', 'book', 'centroid', 'subDim']>;
  /** Left out where every scale is 1. */
  readonly channelScale: Tensor<'f32', readonly ['kvHead', 'dim']> | undefined;
  /** What `encodeKeys` searches. */
  readonly index: Tensor<'u8', readonly ['kvHead', 'book', 'byte']>;
  /** Bits of a code: as many as tell the centroids apart. */
  readonly codeBits: number;
}

/**
 * Places the codebooks of a layer on the stream's device, and builds their index on the host, in the order of the stream.
 * The caller disposes of the tensors.
 * @throws InvalidValueError, ShapeError for codebooks that contradict themselves, or a layer that they do not have
 * @throws OutOfMemoryError
 */
export async function placeCodebooks(stream: Stream, codebooks: Codebooks, layer: number): Promise<PlacedCodebooks> {
  expectCodebooks('placeCodebooks', codebooks);
  const given = codebooks.layers[layer];
  if (given === undefined) {
    throw new InvalidValueError(`placeCodebooks: there is no layer ${layer}; the codebooks have ${codebooks.layers.length}.`, {
      subject: 'layer',
      given: layer,
      wanted: codebooks.layers.length,
    });
  }
  const { device } = stream;
  const { headDim, groups, books, centroids: count } = codebooks;
  const shape = [given.kvHeads, books, count, headDim / groups] as const;
  const axes = ['kvHead', 'book', 'centroid', 'subDim'] as const;
  const indexAxes = ['kvHead', 'book', 'byte'] as const;
  const indexShape = [given.kvHeads, books, centroidIndexBytes(count, headDim / groups)] as const;
  using hostCentroids = await device.hostTensor('f16', axes, shape);
  using hostIndex = await device.hostTensor('u8', indexAxes, indexShape);
  stream.write(hostCentroids, given.centroids);
  indexCentroids(stream, { centroids: hostCentroids, index: hostIndex });
  const scaled = given.scale.some((scale) => scale !== 1);
  return madeTogether((own) => {
    const centroids = own(device.tensor('f16', axes, shape, given.centroids));
    const index = own(device.tensor('u8', indexAxes, indexShape));
    const channelScale = scaled ? own(device.tensor('f32', ['kvHead', 'dim'], [given.kvHeads, headDim], given.scale)) : undefined;
    stream.copy(hostIndex, index);
    return { centroids, channelScale, index, codeBits: codeBitsOf(count) };
  });
}
