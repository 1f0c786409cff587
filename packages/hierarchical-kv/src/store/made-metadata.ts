import { byteSize, type FloatDType, type KvLayer, type Stream, type Tensor, type TensorHandle, transferBlocks } from '@kv/sparse-core';
import { expectThat, madeTogether } from '@kv/sparse-core/native';
import type { BlockMetadataMaker } from '../block-metadata-method.js';
import { blockTokens, type LayerSizes, tableWidth } from './block-sizes.js';

/** Blocks that a maker describes at a time. */
const mostAtOnce = 512;

/** Which blocks of `keys` are described, and where what is made of them goes. */
export interface BlocksToMake {
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly from: readonly number[];
  readonly to: readonly number[];
}

/** What the metadata of a layer's blocks is made in. */
export interface MadeLayer {
  readonly layer: KvLayer;
  readonly metadata: TensorHandle<FloatDType, readonly ['metadataBlock', 'vector', 'dim']>;
}

/** Where a user's maker works: blocks of keys lie one behind the other for it, and what it makes of them goes to its places. */
export class MadeMetadata implements Disposable {
  readonly #write: (...args: Parameters<BlockMetadataMaker['write']>) => unknown;
  readonly #keys: Tensor<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  readonly #vectors: Tensor<FloatDType, readonly ['block', 'vector', 'dim']>;

  static bytes(sizes: LayerSizes): number {
    const { metadata, layer, dtype } = sizes;
    return typeof metadata === 'string' ? 0 : blocksOf(sizes) * (blockTokens + metadata.vectors) * layer.headDim * byteSize(dtype);
  }

  /** @throws OutOfMemoryError */
  constructor(maker: BlockMetadataMaker, sizes: LayerSizes) {
    const { layer, capacity, dtype } = sizes;
    const { device } = capacity;
    const [blocks, { headDim }] = [blocksOf(sizes), layer];
    this.#write = maker.write.bind(maker);
    [this.#keys, this.#vectors] = madeTogether((own) => [
      own(device.tensor(dtype, ['block', 'blockToken', 'dim'], [blocks, blockTokens, headDim])),
      own(device.tensor(dtype, ['block', 'vector', 'dim'], [blocks, maker.vectors, headDim])),
    ]);
  }

  get byteLength(): number {
    return this.#keys.byteLength + this.#vectors.byteLength;
  }

  /** @throws InvalidValueError when the maker returns anything; what it throws */
  write(stream: Stream, { layer, metadata }: MadeLayer, { keys: pool, from, to }: BlocksToMake): void {
    const [most, vectorCount, dims] = this.#vectors.shape;
    const places = asBlocks(metadata);
    for (let first = 0; first < from.length; first += most) {
      const [read, written] = [from, to].map((list) => list.slice(first, first + most)) as [number[], number[]];
      const here = Array.from(read.keys());
      const keys = this.#keys.slice('block', 0, read.length);
      const vectors = this.#vectors.slice('block', 0, read.length);
      transferBlocks(stream, { source: pool, destination: keys, from: read, to: here });
      const result = this.#write(stream, { layer, keys, vectors });
      expectThat('hierarchicalStore', 'the result of metadata.write', result, result === undefined, 'undefined: it enqueues, and does not wait');
      const source = vectors.view(['block', 'blockToken', 'dim'], [read.length, vectorCount, dims]);
      transferBlocks(stream, { source, destination: places, from: here, to: written });
    }
  }

  [Symbol.dispose](): void {
    this.#keys.dispose();
    this.#vectors.dispose();
  }
}

function asBlocks(metadata: MadeLayer['metadata']): TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']> {
  return metadata.view(['block', 'blockToken', 'dim'], metadata.shape);
}

/** No more than the longest sequence has. */
function blocksOf({ layer, capacity }: LayerSizes): number {
  return Math.min(mostAtOnce, layer.kvHeads * tableWidth(capacity));
}
