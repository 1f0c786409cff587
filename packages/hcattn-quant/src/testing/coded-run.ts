import { type Device, hostPool, type KvCapacity, type KvLayer, type KvStore, type PrefillAttention } from '@kv/sparse-core';
import { Random, StoreRun } from '@kv/sparse-core/testing';
import { placeCodebooks } from '../codebooks/place-codebooks.js';
import { bitsOf, type CodedOptions, type IntegerCodec } from '../hc-attention-options.js';
import { hcAttentionHostBytes, hcAttentionStore } from '../hc-attention-store.js';
import { blockTokens } from '../quantized-blocks.js';
import { quantizesPrompts } from '../quantized-prompts.js';
import { codebookKeys, codedOracle, integerKeys } from './block-oracles.js';
import { HeadOracle } from './head-oracle.js';
import { type RandomCodebooks, randomCodebooks } from './random-codebooks.js';

export interface CodedSettings extends Partial<Omit<CodedOptions, 'keys' | 'valuesOn' | 'hostPool'>> {
  readonly prefill: PrefillAttention;
  /** Default: codes of `codebooks`. */
  readonly keys?: IntegerCodec | undefined;
  readonly codebooks?: Partial<RandomCodebooks> | undefined;
  readonly capacity?: Partial<KvCapacity> | undefined;
  readonly seed?: number | undefined;
  /** Query heads of a kv head, of `codedRun`. Default: 2. */
  readonly group?: number | undefined;
}

export const codedLayer: KvLayer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };

/** Stores of coded keys with a pool of just their size, the codebooks, and the options. */
export async function codedStores(device: Device, layers: readonly KvLayer[], settings: CodedSettings) {
  const { prefill, keys: codec, codebooks, capacity, seed = 1, ...options } = settings;
  const sizes = { layers: layers.length, kvHeads: layers[0]?.kvHeads ?? 0, headDim: 64, groups: 16, centroids: 32 };
  const books = randomCodebooks(new Random(seed + 100), { ...sizes, ...codebooks });
  const keys = await placeCodebooks(device, books);
  const given: CodedOptions = { dtype: 'f16', ...options, keys: codec ?? keys, valuesOn: 'host' };
  const room = { device, slots: 3, tokensPerSlot: 1024, tokens: 3072, batchRows: 700, prefill, ...capacity };
  using pool = await hostPool(device, { bytes: hcAttentionHostBytes(given, layers, room) });
  return { books, keys, options: given, capacity: room, stores: hcAttentionStore({ ...given, hostPool: pool }).create(layers, room) };
}

/** A run of a store of one layer beside an oracle of it. By default answers read all tokens. */
export async function codedRun(device: Device, { group = 2, ...settings }: CodedSettings): Promise<StoreRun<HeadOracle>> {
  const layer = { ...codedLayer, queryHeads: group * codedLayer.kvHeads };
  const { books, options, capacity, stores } = await codedStores(device, [layer], { tau: 1, ...settings });
  const { sinkTokens = 4, localWindow = 128, rotated = true } = options;
  const [store] = stores as [KvStore];
  const { slots } = capacity;
  // A prompt's rows attend to a dense part and up to three pieces, each rounded, and so is each merge.
  const run = { device, random: new Random(settings.seed ?? 1), dtype: 'f16', slots, group, roundings: 8 } as const;
  return new StoreRun(store, settings.prefill, run, (kvHead) => {
    const keys = settings.keys === undefined ? codebookKeys(books, kvHead) : integerKeys(64, bitsOf[settings.keys], rotated);
    const blocks = codedOracle(keys, options);
    const stagedBytes = stagedBytesOf(settings.prefill, options);
    const promptBlockTokens = quantizesPrompts.of(settings.prefill)?.blockTokens;
    const kept = { sinkBlocks: Math.ceil(sinkTokens / 64), localWindow };
    return new HeadOracle({ dtype: 'f16', headDim: 64, blocks, ...kept, stagedBytes, promptBlockTokens });
  });
}

/** Bytes of a block of a prompt in host memory, beside those that are there for good. */
export function stagedBytesOf(prefill: PrefillAttention, { values, hostKeys }: Pick<CodedOptions, 'values' | 'hostKeys'>): number | undefined {
  if (quantizesPrompts.of(prefill) === undefined || hostKeys === true) return undefined;
  return (values === 'int8' ? 2 : 1) * blockTokens * 64 * 2;
}
