import { type Device, DeviceError, DisposedError, type Stream, type Tensor } from '@kv/sparse-core';
import { isDevice, madeTogether, show } from '@kv/sparse-core/native';
import type { CodedKeys } from '../coded-keys.js';
import { centroidIndexBytes, indexCentroids } from '../operations/index-centroids.js';
import { codeBitsOf, type Codebooks, expectCodebooks, type LayerCodebooks } from './codebooks.js';

const centroidAxes = ['kvHead', 'book', 'centroid', 'subDim'] as const;
const indexAxes = ['kvHead', 'book', 'byte'] as const;

/** Codebooks of a layer on a device, as the operations over coded keys take them. */
export interface PlacedLayer extends Omit<CodedKeys, 'codedKeys'> {
  /** What `encodeKeys` finds the nearest centroids with. */
  readonly index: Tensor<'u8', typeof indexAxes>;
}

/** Codebooks on a device, made by `placeCodebooks`. Stores that use them must be disposed of first. */
export class PlacedCodebooks implements Disposable {
  readonly device: Device;
  readonly codebooks: Codebooks;
  readonly #owned: readonly Disposable[];
  #layers: readonly PlacedLayer[];

  /** Whether it is one, and no look-alike or proxy. */
  static is(value: unknown): value is PlacedCodebooks {
    return typeof value === 'object' && value !== null && #layers in value;
  }

  constructor(device: Device, codebooks: Codebooks, layers: readonly PlacedLayer[], owned: readonly Disposable[]) {
    this.device = device;
    this.codebooks = codebooks;
    this.#layers = layers;
    this.#owned = owned;
  }

  /** @throws DisposedError */
  layer(index: number): PlacedLayer {
    const placed = this.#layers[index];
    if (placed !== undefined) return placed;
    throw new DisposedError('The codebooks were disposed of; place them anew with placeCodebooks().', { subject: 'codebooks' });
  }

  [Symbol.dispose](): void {
    this.#layers = [];
    for (const each of this.#owned) each[Symbol.dispose]();
  }
}

/** @throws DisposedError, and DeviceError unless they are on the device */
export function expectPlacedOn(operation: string, placed: PlacedCodebooks, device: Device): void {
  placed.layer(0);
  const { device: given } = placed;
  if (given === device) return;
  throw new DeviceError(`${operation}: the codebooks are on ${given.name}, and the cache is on ${device.name}. Place them there too.`, {
    subject: 'codebooks',
    given: given.name,
    wanted: device.name,
  });
}

/**
 * Puts codebooks on a device, with what finds the nearest of their centroids; that is made on the device's workers.
 * @throws InvalidValueError, ShapeError when they are malformed; DeviceError; OutOfMemoryError, all is given back then
 */
export async function placeCodebooks(device: Device, codebooks: Codebooks): Promise<PlacedCodebooks> {
  if (!isDevice(device)) {
    throw new DeviceError(`placeCodebooks: ${show(device)} is no device; open one with createDevice().`, { subject: 'device' });
  }
  expectCodebooks('placeCodebooks', codebooks);
  using stream = device.createStream();
  const owned: Disposable[] = [];
  try {
    const layers: PlacedLayer[] = [];
    for (const layer of codebooks.layers) layers.push(await placeLayer(stream, codebooks, layer, owned));
    await stream.synchronize();
    return new PlacedCodebooks(device, codebooks, layers, owned);
  } catch (error) {
    for (const each of owned) each[Symbol.dispose]();
    throw error;
  }
}

async function placeLayer(stream: Stream, codebooks: Codebooks, { kvHeads, centroids: numbers, scale }: LayerCodebooks, owned: Disposable[]): Promise<PlacedLayer> {
  const { device } = stream;
  const { headDim, groups, books, centroids } = codebooks;
  const shape = [kvHeads, books, centroids, headDim / groups] as const;
  const indexShape = [kvHeads, books, centroidIndexBytes(centroids, headDim / groups)] as const;
  const isScaled = scale.some((factor) => factor !== 1);
  const placed = madeTogether((own) => ({
    centroids: own(device.tensor('f16', centroidAxes, shape, numbers)),
    index: own(device.tensor('u8', indexAxes, indexShape)),
    channelScale: isScaled ? own(device.tensor('f32', ['kvHead', 'dim'], [kvHeads, headDim], scale)) : undefined,
  }));
  owned.push(...Object.values(placed).filter((tensor) => tensor !== undefined));
  using onHost = await device.hostTensor('f16', centroidAxes, shape);
  using indexOnHost = await device.hostTensor('u8', indexAxes, indexShape);
  stream.write(onHost, numbers);
  indexCentroids(stream, { centroids: onHost, index: indexOnHost });
  stream.copy(indexOnHost, placed.index);
  return { ...placed, codeBits: codeBitsOf(centroids) };
}
