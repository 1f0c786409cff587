import { byteSize, type FloatDType, type HostPool, type KvBytes, type KvCapacity, type KvLayer } from '@kv/sparse-core';
import { BlockIds, madeTogether } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import type { BlockCodec, CodeCache } from './block-codec.js';
import { ChoiceRoom, type ChoiceSizes } from './choice-room.js';
import { type Choice, CodedBlocks, type ValuePools } from './coded-blocks.js';
import { bytesOfPool, hostMemoryOf } from './host-memory.js';
import type { KeyFormat, KeyPool } from './key-format.js';
import { MeanValues } from './mean-values.js';

export interface CodedSizes extends ChoiceSizes {
  /** How values are held; i8 with a scale for each token. */
  readonly valueDType: FloatDType | 'i8';
}

export interface CodedCacheOptions extends CodedSizes {
  readonly tau: number;
  readonly keys: KeyFormat;
  readonly hostPool: HostPool | undefined;
}

/** Keys in codes on the device, values on the host, of all layers of a cache. */
export class CodedCache implements CodeCache {
  readonly #choice: Choice;
  readonly #keys: KeyPool;
  readonly #pools: ValuePools;
  readonly #room: ChoiceRoom;

  /** What it takes of a host pool. */
  static hostBytes(sizes: CodedSizes): number {
    const { layers, capacity, valueDType } = sizes;
    const headDim = layers[0]?.headDim ?? 0;
    const blocks = blocksOf(layers, capacity);
    const values = bytesOfPool(valueBlocksOf(sizes) * blockTokens * headDim * byteSize(valueDType));
    const means = sizes.missingMass === 'meanValue' ? MeanValues.hostBytes(blocks, headDim) : 0;
    return values + means + ChoiceRoom.hostBytes(sizes);
  }

  /**
   * @throws what making a pool of the keys' format does; DeviceError, InvalidValueError for a wrong host pool, or none;
   * OutOfMemoryError; all is given back then
   */
  constructor(options: CodedCacheOptions) {
    const { layers, capacity, valueDType, keys, hostPool, tau, missingMass } = options;
    const { device } = capacity;
    const headDim = layers[0]?.headDim ?? 0;
    const blocks = blocksOf(layers, capacity);
    const isCoded = valueDType === 'i8';
    this.#choice = { tau, missingMass };
    [this.#keys, this.#pools, this.#room] = madeTogether((own) => {
      const keyPool = own(keys.createPool(layers, device, blocks));
      const host = hostMemoryOf('hcAttentionStore', device, hostPool, CodedCache.hostBytes(options));
      const hostValues = own(host.tensor(valueDType, ['valueBlock', 'blockToken', 'dim'], [valueBlocksOf(options), blockTokens, headDim]));
      const sizes = { device, slots: capacity.slots, layers, blocks };
      const means = missingMass === 'meanValue' ? own(new MeanValues(hostValues, host, sizes)) : undefined;
      const pools: ValuePools = {
        ids: new BlockIds('coded blocks', blocks),
        blockBytes: {
          device: keyPool.blockBytes + (isCoded ? blockTokens * byteSize('bf16') : 0),
          host: blockTokens * headDim * byteSize(valueDType) + (means?.blockBytes ?? 0),
        },
        hostValues,
        means,
        valueScales: isCoded ? own(device.tensor('bf16', ['valueBlock', 'blockToken'], [blocks, blockTokens])) : undefined,
      };
      return [keyPool, pools, own(new ChoiceRoom(options, host))];
    });
  }

  codecOf(layer: KvLayer, index: number): BlockCodec {
    return new CodedBlocks(layer, index, this.#keys.codecOf(layer, index), this.#pools, this.#room, this.#choice);
  }

  /** Codebooks are the caller's. */
  reserved(): KvBytes {
    const { hostValues, valueScales, means } = this.#pools;
    const device = this.#keys.byteLength + (valueScales?.byteLength ?? 0) + (means?.deviceBytes ?? 0) + this.#room.deviceBytes;
    return { device, host: hostValues.byteLength + (means?.hostBytes ?? 0) + this.#room.hostBytes };
  }

  [Symbol.dispose](): void {
    const { hostValues, valueScales, means } = this.#pools;
    for (const each of [this.#keys, hostValues, valueScales, means, this.#room]) each?.[Symbol.dispose]();
  }
}

/** Those of the means behind those of the values. */
function valueBlocksOf({ layers, capacity, missingMass }: CodedSizes): number {
  const blocks = blocksOf(layers, capacity);
  return missingMass === 'meanValue' ? blocks + MeanValues.blocksFor(blocks) : blocks;
}

function blocksOf(layers: readonly KvLayer[], { tokens }: KvCapacity): number {
  return Math.ceil(tokens / blockTokens) * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0);
}
