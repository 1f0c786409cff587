import { byteSize, type FloatDType, type Stream, type Tensor, type TensorHandle, writeEntries } from '@kv/sparse-core';
import { KvBlockPool, madeTogether } from '@kv/sparse-core/native';
import { metadataVectors } from '../block-metadata-method.js';
import { type BlockCache, workingSetSteps } from '../operations/plan-blocks.js';
import { blockBytes, blockTokens, fixedPlaces, hostBlocksOf, type LayerSizes } from './block-sizes.js';

/** What the device has of a layer: the first and the last blocks of each sequence, a cache of others, and what blocks are scored by. */
export class DeviceBlocks implements Disposable {
  /** Fixed places first, then the cache. */
  readonly pool: KvBlockPool;
  /** `[metadataBlock, vector, dim]`, by number of the host block. */
  readonly metadata: Tensor<FloatDType, readonly ['metadataBlock', 'vector', 'dim']>;
  /** i32 `[metadataBlock]`: of their keys and values, where they are compared. */
  readonly checksums: Tensor<'i32', readonly ['metadataBlock']> | undefined;
  readonly cache: { readonly [Name in keyof BlockCache]: TensorHandle<'i32', Axes[Name]> };
  /** i32 `[slot, kvHead]`: tokens, as the fixed places have them. */
  readonly fixedCounts: Tensor<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[slot]`: blocks that answers of a slot read of each kv head. */
  readonly budgets: Tensor<'i32', readonly ['slot']>;
  /** Blocks of the cache. */
  readonly cached: number;
  readonly #owned: Tensor[];

  /** With so many blocks in the cache. */
  static bytes(sizes: LayerSizes, cached: number): number {
    const { layer, capacity, budgetBlocks, metadata, checksums } = sizes;
    const { kvHeads, headDim } = layer;
    const elementBytes = byteSize(sizes.dtype);
    const hostBlocks = hostBlocksOf(layer, capacity);
    const ofLists = capacity.slots * kvHeads * (workingSetSteps * budgetBlocks + 1) + capacity.slots;
    const described = hostBlocks * metadataVectors(metadata) * headDim * elementBytes;
    const places = (fixedPlaces(sizes) + cached) * blockBytes(headDim, elementBytes);
    return places + described + 4 * (hostBlocks * (checksums ? 2 : 1) + 2 * cached + 1 + ofLists);
  }

  /** @param demand the layer's counts of what its slots read @throws OutOfMemoryError */
  constructor(sizes: LayerSizes, cached: number, demand: BlockCache['demand']) {
    const { layer, capacity, dtype, budgetBlocks } = sizes;
    const { device, slots } = capacity;
    const { kvHeads, headDim } = layer;
    const hostBlocks = hostBlocksOf(layer, capacity);
    const heads = [slots, kvHeads] as const;
    const owned: Tensor[] = [];
    [this.pool, this.metadata, this.checksums, this.cache, this.fixedCounts, this.budgets] = madeTogether((own) => {
      const keep = <Kind extends Tensor>(made: Kind): Kind => {
        owned.push(own(made));
        return made;
      };
      const filled = <const A extends readonly string[]>(axes: A, shape: { readonly [Axis in keyof A]: number }, number = 0) => {
        const count = shape.reduce((product, extent) => product * extent, 1);
        return keep(device.tensor('i32', axes, shape, new Int32Array(count).fill(number)));
      };
      return [
        own(new KvBlockPool({ memory: device, dtype, headDim, blockTokens, blocks: fixedPlaces(sizes) + cached })),
        keep(device.tensor(dtype, ['metadataBlock', 'vector', 'dim'], [hostBlocks, metadataVectors(sizes.metadata), headDim])),
        sizes.checksums ? filled(['metadataBlock'], [hostBlocks]) : undefined,
        {
          where: filled(['hostBlock'], [hostBlocks], -1),
          holds: filled(['cachedBlock'], [cached], -1),
          usedAt: filled(['cachedBlock'], [cached]),
          clock: filled(['one'], [1]),
          history: filled(['slot', 'kvHead', 'step', 'chosenBlock'], [...heads, workingSetSteps, budgetBlocks]),
          demand,
        },
        filled(['slot', 'kvHead'], heads),
        filled(['slot'], [slots], budgetBlocks),
      ];
    });
    this.#owned = owned;
    this.cached = cached;
  }

  /** Bytes of the metadata of a block. */
  get metadataBytes(): number {
    return (this.metadata.byteLength + (this.checksums?.byteLength ?? 0)) / this.metadata.shape[0];
  }

  get byteLength(): number {
    return this.#owned.reduce((sum, { byteLength }) => sum + byteLength, this.pool.byteLength);
  }

  /** Says that the cache has none of these host blocks: their contents change, or their memory is wanted. */
  forget(stream: Stream, hostBlocks: Int32Array): void {
    if (hostBlocks.length === 0) return;
    writeEntries(stream, { table: this.cache.where, at: hostBlocks, entries: new Int32Array(hostBlocks.length).fill(-1) });
  }

  /** Says that the cache has nothing, and begins all counts anew. */
  reset(stream: Stream): void {
    const { where, holds, demand } = this.cache;
    for (const tensor of [where, holds]) stream.write(tensor, new Int32Array(tensor.shape[0]).fill(-1));
    stream.write(demand, new Int32Array(demand.byteLength / 4));
  }

  /** Begins the counts of a slot anew. */
  resetDemand(stream: Stream, slot: number): void {
    const counts = this.cache.demand.slice('slot', slot, slot + 1);
    stream.write(counts, new Int32Array(counts.byteLength / 4));
  }

  [Symbol.dispose](): void {
    this.pool.dispose();
    for (const tensor of this.#owned) tensor.dispose();
  }
}

type Axes = { readonly [Name in keyof BlockCache]: BlockCache[Name]['axes'] };
