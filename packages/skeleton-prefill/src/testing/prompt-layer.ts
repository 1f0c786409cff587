import { createRowBatch, densePagedStore, ropeDescription } from '@kv/sparse-core';
import type { Device, KvStore, PrefillAttention, PrefillReport, PrefillState, RopeDescription, Stream } from '@kv/sparse-core';
import { encode, Random } from '@kv/sparse-core/testing';

import { syntheticAttention } from './synthetic-attention.js';

/** Of the prompts here. */
export const layer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 32 };
export const rope: RopeDescription = ropeDescription({ theta: 1e4, headDim: 32, rotaryDim: 16 });
export const scale = 32 ** -0.5;

export interface Prompt {
  readonly tokens: number;
  /** `[token, head, dim]` as f32. */
  readonly query: Float32Array;
  readonly keys: Float32Array;
  readonly values: Float32Array;
}

export function joined(parts: readonly Float32Array[]): Float32Array {
  const all = new Float32Array(parts.reduce((sum, { length }) => sum + length, 0));
  let written = 0;
  for (const part of parts) {
    all.set(part, written);
    written += part.length;
  }
  return all;
}

const prompts = new Map<string, Prompt>();

/**
 * Keys with the parts that the estimate looks for; the heads of a group have the same queries but for a factor. Made
 * once for all devices: not to be written to.
 */
export function syntheticPrompt(seed: number, tokens: number): Prompt {
  const name = `${seed} ${tokens}`;
  const prompt = prompts.get(name) ?? newPrompt(seed, tokens);
  prompts.set(name, prompt);
  return prompt;
}

function newPrompt(seed: number, tokens: number): Prompt {
  const random = new Random(seed);
  const heads = [0, 1].map(() => syntheticAttention(random, rope, { tokens, dim: 32, sinkTokens: 4 }));
  const flat = (rows: (token: number) => Float64Array[]) =>
    joined(Array.from({ length: tokens }, (_, token) => rows(token).map((row) => encode('f32', row))).flat());
  return {
    tokens,
    query: flat((token) => heads.flatMap(({ queries: { [token]: row = new Float64Array() } }) => [row, row.map((x) => 1.5 * x)])),
    keys: flat((token) => heads.map(({ keys }) => keys[token] ?? new Float64Array())),
    values: Float32Array.from({ length: tokens * 2 * 32 }, () => random.normal()),
  };
}

/** `[head][token]` of `[token, head, dim]`. */
export function rowsOfHeads(numbers: Float32Array, heads: number): Float64Array[][] {
  return Array.from({ length: heads }, (_, head) =>
    Array.from({ length: numbers.length / (heads * 32) }, (_, token) => {
      return Float64Array.from(numbers.subarray((token * heads + head) * 32, (token * heads + head + 1) * 32));
    }),
  );
}

export interface Step {
  readonly slot: number;
  readonly position: number;
  readonly rows: number;
  readonly prompt: Prompt;
  readonly ends: boolean;
}

/** A layer that reads prompts by a method. */
export class Layer {
  readonly store: KvStore;
  readonly state: PrefillState | undefined;
  readonly device: Device;
  readonly #stream: Stream;
  readonly #prefill: PrefillAttention;
  readonly #rope: RopeDescription;

  constructor(device: Device, stream: Stream, prefill: PrefillAttention, turned: RopeDescription = rope) {
    const capacity = { device, slots: 3, tokensPerSlot: 16_384, tokens: 3 * 16_384 };
    const [store] = densePagedStore({ dtype: 'f32' }).create([layer], capacity);
    if (store === undefined) throw new Error('a layer has a store');
    this.store = store;
    this.state = prefill.open?.(layer, capacity);
    this.device = device;
    this.#stream = stream;
    this.#prefill = prefill;
    this.#rope = turned;
  }

  /** One step: the outputs of its rows, and what the method says of it. */
  async step(steps: readonly Step[]): Promise<{ output: Float32Array; report: PrefillReport }> {
    const [device, stream] = [this.device, this.#stream];
    using batch = createRowBatch(device, stream, steps.map(({ slot, position, rows }) => ({ slot, position, rows })));
    const rowsOf = (numbers: (prompt: Prompt) => Float32Array, heads: number) =>
      joined(
        steps.map(({ prompt, position, rows }) => {
          return numbers(prompt).subarray(position * heads * 32, (position + rows) * heads * 32);
        }),
      );
    const tensor = <A extends string>(axis: A, heads: number, numbers: (prompt: Prompt) => Float32Array) =>
      device.tensor('f32', ['token', axis, 'dim'], [batch.rows, heads, 32], rowsOf(numbers, heads));
    using query = tensor('queryHead', 4, (prompt) => prompt.query);
    using keys = tensor('kvHead', 2, (prompt) => prompt.keys);
    using values = tensor('kvHead', 2, (prompt) => prompt.values);
    using output = device.tensor('f32', ['token', 'queryHead', 'dim'], [batch.rows, 4, 32]);
    const { store, state } = this;
    store.prepare(stream, batch);
    store.append(stream, { batch, keys, values });
    store.advance(batch);
    const endsPrompt = steps.map(({ ends }) => ends);
    const rows = { query, keys, values, rope: this.#rope, output, scale };
    const { report } = this.#prefill.attend(stream, { store, state, batch, endsPrompt, ...rows });
    return { output: await output.read(), report: await report };
  }

  fork(fromSlot: number, toSlot: number): void {
    this.store.copy?.(this.#stream, fromSlot, toSlot);
    this.state?.copy(this.#stream, fromSlot, toSlot);
  }

  keepEverySecond(slot: number, tokens: number): void {
    const kept = tokens / 2;
    const places = Int32Array.from({ length: 2 * kept }, (_, index) => 2 * (index % kept));
    using indices = this.device.tensor('i32', ['kvHead', 'kept'], [2, kept], places);
    this.store.keep(this.#stream, slot, { indices, counts: [kept, kept] });
  }

  /** A prompt by itself, in steps that end where they say. */
  async read(prompt: Prompt, ends: readonly number[], slot = 0) {
    const found: Float32Array[] = [];
    const reports: PrefillReport[] = [];
    for (const [index, end] of ends.entries()) {
      const position = ends[index - 1] ?? 0;
      const ended = end === prompt.tokens;
      const { output, report } = await this.step([{ slot, position, rows: end - position, prompt, ends: ended }]);
      found.push(output);
      reports.push(report);
    }
    return { output: joined(found), reports };
  }
}
