import type { FloatDType, KvCapacity, KvLayer, KvStore } from '@kv/sparse-core';
import { densePagedStores } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { quantizesPrompts } from '../quantized-prompts.js';
import { AttentionScratch } from './attention-scratch.js';
import type { CodeCache } from './block-codec.js';
import { QuantizedStore } from './quantized-store.js';

/** Which tokens stay dense. */
export interface DenseTokens {
  readonly sinkBlocks: number;
  readonly localWindow: number;
}

export interface StoreKind extends DenseTokens {
  readonly name: string;
  /** Of what stays dense. */
  readonly dtype: FloatDType | undefined;
  /** @throws OutOfMemoryError and other errors */
  readonly createCache: (layers: readonly KvLayer[], capacity: KvCapacity, dtype: FloatDType) => CodeCache;
}

/**
 * The stores of layers, which share a cache.
 * @throws OutOfMemoryError, and what `createCache` throws; everything is given back then
 */
export function createStores(layers: readonly KvLayer[], capacity: KvCapacity, kind: StoreKind): KvStore[] {
  const { name, dtype, createCache, ...kept } = kind;
  const { prefill } = capacity;
  const reading = prefill && quantizesPrompts.of(prefill);
  const denseCapacity = reading ? capacityOf(capacity, kept) : capacity;
  const blocks = reading && blocksOf(layers, denseCapacity, capacity, kept);
  const undo: (() => void)[] = [];
  const undone = <Kind extends Disposable>(made: Kind): Kind => {
    undo.push(() => made[Symbol.dispose]());
    return made;
  };
  try {
    const dense = densePagedStores(layers, denseCapacity, { name, dtype, blockTokens, blocks });
    undo.push(() => dense.forEach((store) => store.dispose()));
    const elements = dense[0]?.denseBlocks().keys.dtype ?? 'f16';
    const cache = undone(createCache(layers, capacity, elements));
    const scratch = undone(new AttentionScratch(layers, capacity, elements, cache.fetches));
    let open = layers.length;
    const close = () => {
      if (--open > 0) return;
      cache[Symbol.dispose]();
      scratch[Symbol.dispose]();
    };
    const { device, host } = cache.reserved();
    const shared = { device: (device + scratch.byteLength) / layers.length, host: host / layers.length };
    const parts = { name, capacity, scratch, ...kept, reading, close, shared };
    return dense.map((ofLayer, index) => {
      const { layer } = ofLayer;
      const store = new QuantizedStore({ ...parts, layer, codec: cache.codecOf(layer, index), dense: ofLayer });
      undo.push(() => store.dispose());
      return store;
    });
  } catch (error) {
    for (const each of undo.reverse()) each();
    throw error;
  }
}

/** Tokens of a sequence that are dense between two steps, at the most. */
function denseTokens({ sinkBlocks, localWindow }: DenseTokens): number {
  return (sinkBlocks + Math.ceil(localWindow / blockTokens) + 1) * blockTokens;
}

/** What stays dense of prompts that are quantized while they are read: a step's rows, sinks, windows and open blocks. */
function capacityOf(capacity: KvCapacity, kept: DenseTokens): KvCapacity {
  const { slots, tokens, tokensPerSlot, batchRows = tokens } = capacity;
  const ofSlot = denseTokens(kept);
  return {
    ...capacity,
    tokens: Math.min(tokens, slots * ofSlot + batchRows),
    tokensPerSlot: Math.min(tokensPerSlot, ofSlot + batchRows),
  };
}

/** Blocks for that: a step's rows are dense in one layer after the other. */
function blocksOf(layers: readonly KvLayer[], dense: KvCapacity, { slots, tokens, batchRows = tokens }: KvCapacity, kept: DenseTokens): number {
  const heads = layers.map(({ kvHeads }) => kvHeads);
  const allHeads = heads.reduce((sum, each) => sum + each, 0);
  const between = slots * (denseTokens(kept) / blockTokens + 1) * allHeads;
  const rows = (Math.ceil(batchRows / blockTokens) + slots) * Math.max(...heads);
  return Math.min(between + rows, (Math.ceil(dense.tokens / blockTokens) + slots) * allHeads);
}
