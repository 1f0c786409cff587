import { byteSize, type FloatDType, type KvBytes, type KvCapacity, type KvLayer, type Tensor } from '@kv/sparse-core';
import { bytesOfPool, type HostMemory, madeTogether } from '@kv/sparse-core/native';
import type { MissingMass } from '../operations/select-by-mass.js';
import { blockTokens } from '../quantized-blocks.js';
import { MeanValues } from './mean-values.js';

export interface HostBlockSizes {
  readonly layers: readonly KvLayer[];
  readonly capacity: KvCapacity;
  /** How values are held; i8 with a scale for each token. */
  readonly valueDType: FloatDType | 'i8';
  /** Of keys. */
  readonly dtype: FloatDType;
  /** Whether the keys themselves are there too. */
  readonly hostKeys: boolean;
  /** With 'meanValue' the mean of the values is there too. */
  readonly missingMass: MissingMass;
}

const axes = ['valueBlock', 'blockToken', 'dim'] as const;

function extentsOf({ layers, capacity, missingMass }: HostBlockSizes) {
  const blocks = blocksOf(layers, capacity);
  const ofMeans = missingMass === 'meanValue' ? MeanValues.blocksFor(blocks) : 0;
  return { blocks, valueBlocks: blocks + ofMeans, headDim: layers[0]?.headDim ?? 0 };
}

/** Blocks of all kv heads of all layers. */
export function blocksOf(layers: readonly KvLayer[], { tokens }: KvCapacity): number {
  return Math.ceil(tokens / blockTokens) * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0);
}

/** What is on the host of all layers' blocks, `[valueBlock, blockToken, dim]`. A block has the same number in each pool. */
export class HostBlocks implements Disposable {
  readonly values: Tensor<FloatDType | 'i8', typeof axes>;
  /** The keys themselves, where chosen tokens are weighted by them. */
  readonly keys: Tensor<FloatDType, typeof axes> | undefined;
  /** Of i8 values: on the device, where the weights are made, or with the keys on the host. */
  readonly valueScales: Tensor<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
  /** Of values, where they stand for what is left out. */
  readonly means: MeanValues | undefined;

  /** What it takes of a host pool. */
  static hostBytes(sizes: HostBlockSizes): number {
    const { valueDType, dtype, hostKeys, missingMass } = sizes;
    const { blocks, valueBlocks, headDim } = extentsOf(sizes);
    const values = bytesOfPool(valueBlocks * blockTokens * headDim * byteSize(valueDType));
    const keys = hostKeys ? bytesOfPool(blocks * blockTokens * headDim * byteSize(dtype)) : 0;
    const scales = hostKeys && valueDType === 'i8' ? bytesOfPool(blocks * blockTokens * byteSize('bf16')) : 0;
    return values + keys + scales + (missingMass === 'meanValue' ? MeanValues.hostBytes(blocks, headDim) : 0);
  }

  /** @throws OutOfMemoryError */
  constructor(sizes: HostBlockSizes, memory: HostMemory) {
    const { layers, valueDType, dtype, hostKeys, missingMass } = sizes;
    const { device, slots } = sizes.capacity;
    const { blocks, valueBlocks, headDim } = extentsOf(sizes);
    const scaleMemory = hostKeys ? memory : device;
    [this.values, this.keys, this.valueScales, this.means] = madeTogether((own) => {
      const values = own(memory.tensor(valueDType, axes, [valueBlocks, blockTokens, headDim]));
      return [
        values,
        hostKeys ? own(memory.tensor(dtype, axes, [blocks, blockTokens, headDim])) : undefined,
        valueDType === 'i8' ? own(scaleMemory.tensor('bf16', ['valueBlock', 'blockToken'], [blocks, blockTokens])) : undefined,
        missingMass === 'meanValue' ? own(new MeanValues(values, memory, { device, slots, layers, blocks })) : undefined,
      ];
    });
  }

  /** Of one block. */
  get blockBytes(): KvBytes {
    const { values, keys, valueScales, means } = this;
    const ofBlock = (tensor: Tensor | undefined) => (tensor === undefined ? 0 : tensor.byteLength / (tensor.shape[0] ?? NaN));
    const scales = ofBlock(valueScales);
    const host = ofBlock(values) + ofBlock(keys) + (means?.blockBytes ?? 0);
    return keys === undefined ? { device: scales, host } : { device: 0, host: host + scales };
  }

  /** Of all blocks. */
  get bytes(): KvBytes {
    const { values, keys, valueScales, means } = this;
    const scales = valueScales?.byteLength ?? 0;
    const host = values.byteLength + (means?.hostBytes ?? 0);
    const device = means?.deviceBytes ?? 0;
    return keys === undefined ? { device: device + scales, host } : { device, host: host + keys.byteLength + scales };
  }

  [Symbol.dispose](): void {
    for (const each of [this.values, this.keys, this.valueScales, this.means]) each?.[Symbol.dispose]();
  }
}
