import { byteSize, type FloatDType, type HostPool, type KvBytes, type KvCapacity, type KvLayer, type Tensor } from '@kv/sparse-core';
import { BlockIds, madeTogether } from '@kv/sparse-core/native';
import { expectCodebooksOf, codeBitsOf } from '../codebooks/codebooks.js';
import { expectPlacedOn, type PlacedCodebooks } from '../codebooks/place-codebooks.js';
import { codedBlockBytes } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';
import type { BlockCodec, CodeCache } from './block-codec.js';
import { ChoiceRoom, type ChoiceSizes } from './choice-room.js';
import { type Choice, CodedBlocks, type CodedPools } from './coded-blocks.js';
import { bytesOfPool, hostMemoryOf } from './host-memory.js';

export interface CodedSizes extends ChoiceSizes {
  /** How values are held; i8 with a scale for each token. */
  readonly valueDType: FloatDType | 'i8';
}

export interface CodedCacheOptions extends CodedSizes, Choice {
  readonly codebooks: PlacedCodebooks;
  readonly hostPool: HostPool | undefined;
}

/** Keys in codes on the device, values on the host, of all layers of a cache. */
export class CodedCache implements CodeCache {
  readonly #options: CodedCacheOptions;
  readonly #pools: CodedPools & { readonly codedKeys: Tensor };
  readonly #room: ChoiceRoom;

  /** What it takes of a host pool. */
  static hostBytes(sizes: CodedSizes): number {
    const { layers, capacity, valueDType } = sizes;
    const headDim = layers[0]?.headDim ?? 0;
    return bytesOfPool(blocksOf(layers, capacity) * blockTokens * headDim * byteSize(valueDType)) + ChoiceRoom.hostBytes(sizes);
  }

  /**
   * @throws ShapeError, DeviceError, DisposedError when the codebooks are others'; DeviceError, InvalidValueError for a wrong
   * host pool, or none; OutOfMemoryError, all is given back then
   */
  constructor(options: CodedCacheOptions) {
    const { layers, capacity, valueDType, codebooks: placed, hostPool } = options;
    const { device } = capacity;
    expectPlacedOn('hcAttentionStore', placed, device);
    expectCodebooksOf('hcAttentionStore', placed.codebooks, layers);
    const { groups, headDim, centroids } = placed.codebooks;
    const [blocks, keyBytes] = [blocksOf(layers, capacity), codedBlockBytes(groups, codeBitsOf(centroids))];
    const isCoded = valueDType === 'i8';
    const host = hostMemoryOf('hcAttentionStore', device, hostPool, CodedCache.hostBytes(options));
    this.#options = options;
    [this.#pools, this.#room] = madeTogether((own) => [
      {
        ids: new BlockIds('coded blocks', blocks),
        blockBytes: {
          device: keyBytes + (isCoded ? blockTokens * byteSize('bf16') : 0),
          host: blockTokens * headDim * byteSize(valueDType),
        },
        codedKeys: own(device.tensor('u8', ['codedBlock', 'byte'], [blocks, keyBytes])),
        hostValues: own(host.tensor(valueDType, ['valueBlock', 'blockToken', 'dim'], [blocks, blockTokens, headDim])),
        valueScales: isCoded ? own(device.tensor('bf16', ['valueBlock', 'blockToken'], [blocks, blockTokens])) : undefined,
      },
      own(new ChoiceRoom(options, host)),
    ]);
  }

  codecOf(layer: KvLayer, index: number): BlockCodec {
    const { codebooks, tau, missingMass } = this.#options;
    return new CodedBlocks(layer, codebooks.layer(index), this.#pools, this.#room, { tau, missingMass });
  }

  /** Codebooks are the caller's. */
  reserved(): KvBytes {
    const { codedKeys, hostValues, valueScales } = this.#pools;
    const device = codedKeys.byteLength + (valueScales?.byteLength ?? 0) + this.#room.deviceBytes;
    return { device, host: hostValues.byteLength + this.#room.hostBytes };
  }

  [Symbol.dispose](): void {
    const { codedKeys, hostValues, valueScales } = this.#pools;
    for (const tensor of [codedKeys, hostValues, valueScales]) tensor?.dispose();
    this.#room[Symbol.dispose]();
  }
}

function blocksOf(layers: readonly KvLayer[], { tokens }: KvCapacity): number {
  return Math.ceil(tokens / blockTokens) * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0);
}
