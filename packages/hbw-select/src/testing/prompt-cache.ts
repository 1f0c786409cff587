import { createRowBatch, densePagedStore } from '@kv/sparse-core';
import type { Device, FloatDType, KvSelector, KvStore, SelectCall, Stream, TensorHandle } from '@kv/sparse-core';
import { decode, Random } from '@kv/sparse-core/testing';

export interface PromptSizes {
  readonly tokens: number;
  readonly window: number;
  readonly kvHeads: number;
  /** Query heads of each kv head. */
  readonly group: number;
  readonly dim: number;
}

/** A random prompt's keys and last queries, and what they are as numbers. */
export interface Prompt extends PromptSizes {
  readonly dtype: FloatDType;
  /** `[token, kvHead, dim]`, stored elements. */
  readonly keys: Float32Array | Uint16Array;
  readonly keyNumbers: Float64Array;
  /** `[token, queryHead, dim]` of the window. */
  readonly queries: Float32Array | Uint16Array;
  readonly queryNumbers: Float64Array;
}

export function randomPrompt(random: Random, sizes: PromptSizes, dtype: FloatDType = 'f16'): Prompt {
  const { tokens, window, kvHeads, group, dim } = sizes;
  const keys = random.elements(dtype, tokens * kvHeads * dim, 2);
  const queries = random.elements(dtype, Math.min(tokens, window) * kvHeads * group * dim);
  return {
    ...sizes,
    dtype,
    keys,
    keyNumbers: decode(dtype, keys),
    queries,
    queryNumbers: decode(dtype, queries),
  };
}

/** A layer's dense store with room for `slots` prompts of `tokens` tokens. */
export function openStore(device: Device, prompt: Prompt, { slots = 1, tokens = prompt.tokens, layer = 0 } = {}): KvStore {
  const { kvHeads, group, dim, dtype } = prompt;
  const layers = [{ index: layer, queryHeads: kvHeads * group, kvHeads, headDim: dim }];
  const capacity = { device, slots, tokensPerSlot: prompt.tokens + 64, tokens };
  const [store] = densePagedStore({ dtype }).create(layers, capacity);
  if (store === undefined) throw new Error('a layer has a store');
  return store;
}

/** Caches a prompt in chunks, and says what a selector is told at its end. */
export function cachePrompt(stream: Stream, store: KvStore, slot: number, prompt: Prompt, chunk: number): SelectCall {
  const { device } = stream;
  const { tokens, kvHeads, group, dim, dtype, keys, queries } = prompt;
  for (let position = 0; position < tokens; position += chunk) {
    const rows = Math.min(chunk, tokens - position);
    const elements = keys.slice(position * kvHeads * dim, (position + rows) * kvHeads * dim);
    const batch = createRowBatch(device, stream, [{ slot, position, rows }]);
    using chunkKeys = device.tensor(dtype, ['token', 'kvHead', 'dim'], [rows, kvHeads, dim], elements);
    store.prepare(stream, batch);
    store.append(stream, { batch, keys: chunkKeys, values: chunkKeys });
    store.advance(batch);
    batch.dispose();
  }
  const shape = [queries.length / (kvHeads * group * dim), kvHeads * group, dim] as const;
  const lastQueries: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']> = device.tensor(
    dtype,
    ['token', 'queryHead', 'dim'],
    shape,
    queries,
  );
  return { store, slot, lastQueries, scale: dim ** -0.5, tokens };
}

/** The tokens that a selector keeps of a prompt, of each kv head. */
export async function selectedTokens(stream: Stream, prompt: Prompt, selector: KvSelector): Promise<number[][]> {
  const store = openStore(stream.device, prompt);
  const call = cachePrompt(stream, store, 0, prompt, 128);
  const selection = await selector.select(stream, call);
  if (selection === undefined) throw new Error('a selection was expected');
  const width = selection.indices.shape[1];
  const indices = await selection.indices.read(stream);
  for (const each of [selection.indices, call.lastQueries, store]) each.dispose();
  return selection.counts.map((count, head) => [...indices.subarray(head * width, head * width + count)]);
}
