import type { FloatDType, KvCapacity, KvLayer, KvStoreFactory } from '@kv/sparse-core';
import { expectCapacity } from '@kv/sparse-core/native';
import { bitsOf, type CodedOptions, expectStoreOptions, type HcAttentionOptions, type QuantizedOptions } from './hc-attention-options.js';
import { blockTokens } from './quantized-blocks.js';
import { CodedCache, type CodedSizes } from './store/coded-cache.js';
import { createStores, type StoreKind } from './store/create-stores.js';
import { integerKeys } from './store/integer-keys.js';
import { QuantizedPools } from './store/quantized-pools.js';
import { vectorKeys } from './store/vector-keys.js';

/**
 * Keys and values as codes in blocks of 64 tokens of one kv head. The first tokens, the last ones and the block that fills
 * are dense, on the device. With `hcAttentionPrefill()` in the capacity a prompt is quantized while it is read, and
 * pools are of the size of the codes; with any other it is quantized when it is complete, after a selection.
 *
 * With `valuesOn: 'device'` keys and values are integer codes there. With `valuesOn: 'host'` keys are codes of codebooks
 * or integers on the device, and values are in host memory: an answer reads those of the fewest tokens that reach the share `tau` of its
 * attention. With `hostKeys` the keys are there too: codes choose the tokens, and their keys weigh them.
 *
 * Cutting a sequence inside of a quantized block makes what is left of that block dense again, as it is held.
 * @throws InvalidValueError when an option is none; CapabilityError when values are to be elsewhere. Making stores throws
 * ShapeError for codebooks of another model, DeviceError for those of another device, InvalidValueError without a host pool
 * where the device has memory of its own
 */
export function hcAttentionStore(options: HcAttentionOptions): KvStoreFactory {
  expectStoreOptions(options);
  const kind = options.valuesOn === 'host' ? codedKind(options) : quantizedKind(options);
  return {
    name: kind.name,
    create(given, capacity) {
      const layers = expectCapacity(given, capacity);
      return layers.length === 0 ? [] : createStores(layers, capacity, kind);
    },
  };
}

/**
 * Bytes of the host pool that stores with these options take. A capacity that names `hcAttentionPrefill()` takes more: its
 * prompts pass through host memory.
 * @throws InvalidValueError, ShapeError as making the stores does
 */
export function hcAttentionHostBytes(options: CodedOptions, layers: readonly KvLayer[], capacity: KvCapacity): number {
  expectStoreOptions(options);
  const { dtype = 'f16' } = options;
  return CodedCache.hostBytes({ ...codedSizes(options, dtype), layers: expectCapacity(layers, capacity), capacity });
}

function quantizedKind({ keys, values, sinkTokens = 0, localWindow = 64, dtype }: QuantizedOptions): StoreKind {
  const [keyBits, valueBits] = [bitsOf[keys], bitsOf[values]];
  return {
    name: keys === values ? `hcattn ${keys}` : `hcattn ${keys} keys, ${values} values`,
    dtype,
    sinkBlocks: Math.ceil(sinkTokens / blockTokens),
    localWindow,
    createCache: (layers, { device, tokens }) =>
      new QuantizedPools({
        device,
        headDim: layers[0]?.headDim ?? NaN,
        keyBits,
        valueBits,
        blocks: Math.ceil(tokens / blockTokens) * layers.reduce((sum, { kvHeads }) => sum + kvHeads, 0),
      }),
  };
}

function codedKind(options: CodedOptions): StoreKind {
  const { values, hostPool, tau = 0.9, sinkTokens = 4, localWindow = 128, rotated = true } = options;
  const keys = typeof options.keys === 'string' ? integerKeys(options.keys, rotated) : vectorKeys(options.keys);
  return {
    name: `hcattn ${keys.name}${values === 'int8' ? ', int8 values' : ''}${options.hostKeys === true ? ', keys on the host too' : ''}`,
    dtype: options.dtype ?? (values === 'int8' ? undefined : values),
    sinkBlocks: Math.ceil(sinkTokens / blockTokens),
    localWindow,
    createCache: (layers, capacity, dtype) =>
      new CodedCache({ ...codedSizes(options, dtype), layers, capacity, keys, hostPool, tau }),
  };
}

function codedSizes({ values, hostKeys = false, maxTokens = Infinity, missingMass = 'renormalise' }: CodedOptions, dtype: FloatDType): Omit<CodedSizes, 'layers' | 'capacity'> {
  return { valueDType: values === 'int8' ? 'i8' : dtype, dtype, hostKeys, maxTokens, missingMass };
}
