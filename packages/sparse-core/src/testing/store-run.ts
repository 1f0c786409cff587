import { expect } from 'vitest';
import type { KvStore } from '../contracts/kv-store.js';
import type { PrefillAttention } from '../contracts/prefill-attention.js';
import { createRowBatch, type RowBatchEntry } from '../contracts/row-batch.js';
import type { Device, Stream } from '../handles.js';
import { ropeDescription } from '../operations/rope-description.js';
import { type CacheDType, excess, type HeldRows } from './held-rows.js';
import { decode, type Random, unitRoundoff } from './random.js';

const axes = ['token', 'queryHead', 'dim'] as const;
const kvAxes = ['token', 'kvHead', 'dim'] as const;

export interface StoreRunOptions {
  readonly device: Device;
  readonly random: Random;
  readonly dtype: CacheDType;
  readonly slots: number;
  /** Query heads of a kv head. */
  readonly group: number;
  /** How often a GPU rounds weights, or the output of a part, on the way to a result. Default: 1. */
  readonly roundings?: number | undefined;
  /** Whether steps of answers are recorded and replayed. Default: no. */
  readonly recorded?: boolean | undefined;
}

/** Drives a store as a model does, beside an oracle of what it holds of each kv head of each slot. */
export class StoreRun<Head extends HeldRows> {
  readonly stream: Stream;
  readonly store: KvStore;
  readonly heads: Head[][];
  readonly #newHead: (kvHead: number) => Head;
  readonly #options: StoreRunOptions;
  readonly #prefill: PrefillAttention;

  /** @param newHead one that holds nothing, of a kv head */
  constructor(store: KvStore, prefill: PrefillAttention, options: StoreRunOptions, newHead: (kvHead: number) => Head) {
    this.stream = options.device.createStream();
    this.#newHead = newHead;
    this.store = store;
    this.#prefill = prefill;
    this.#options = options;
    this.heads = Array.from({ length: options.slots }, () => Array.from({ length: store.layer.kvHeads }, (_head, kvHead) => newHead(kvHead)));
  }

  copy(fromSlot: number, toSlot: number, dropped = 0): void {
    this.store.copy?.(this.stream, fromSlot, toSlot, dropped);
    this.heads[toSlot] = this.heads[fromSlot]?.map((head) => head.clone() as Head) ?? [];
    for (const head of this.heads[toSlot]) head.truncate(dropped);
  }

  release(slot: number): void {
    this.store.release(this.stream, slot);
    this.heads[slot] = this.heads[slot]?.map((_, kvHead) => this.#newHead(kvHead)) ?? [];
  }

  /**
   * Appends random keys and values, and gives the bits of the attention of random queries of the rows. `prune` is what
   * the store should do before a step, and before a prompt's attention.
   */
  async step(
    entries: readonly RowBatchEntry[],
    phase: 'prefill' | 'decode',
    prune?: (head: Head) => void,
  ): Promise<Float32Array> {
    return (await this.#step(entries, phase, prune)).bits;
  }

  /** The same, held to the oracle. */
  async check(
    entries: readonly RowBatchEntry[],
    phase: 'prefill' | 'decode',
    prune?: (head: Head) => void,
  ): Promise<void> {
    const { queries, bits } = await this.#step(entries, phase, prune);
    const { random } = this.#options;
    let firstToken = 0;
    for (const { slot, rows } of entries) {
      // Some rows of a long prompt, its last among them.
      const checked = new Set([rows - 1, ...Array.from({ length: 7 }, () => random.integer(0, rows - 1))]);
      const expectRow = this.#expectRowsOf(slot, queries, bits);
      for (const row of checked) expectRow(rows - row - 1, firstToken + row);
      firstToken += rows;
    }
  }

  /** Attention of a random query over all that each of these slots holds, held to the oracle; adds nothing. */
  async checkHeld(slots: readonly number[]): Promise<void> {
    const { device, random, dtype, group } = this.#options;
    const { kvHeads, headDim } = this.store.layer;
    const shape = [slots.length, kvHeads * group, headDim] as const;
    const elements = random.elements(dtype, slots.length * kvHeads * group * headDim);
    using batch = createRowBatch(device, this.stream, slots.map((slot) => ({ slot, position: 0, rows: 1 })));
    using query = device.tensor(dtype, axes, shape, elements);
    using output = device.tensor(device.kind === 'cuda' ? dtype : 'f32', axes, shape);
    this.store.startDecode(this.stream, { batch, query, output, scale: headDim ** -0.5 })();
    const bits = Float32Array.from(decode(output.dtype, await output.read(this.stream)));
    const queries = decode(dtype, elements);
    slots.forEach((slot, row) => this.#expectRowsOf(slot, queries, bits)(0, row));
  }

  /** Holds row `row` of a result to the oracle, in front of the `hidden` newest tokens of a slot. */
  #expectRowsOf(slot: number, queries: Float64Array, bits: Float32Array): (hidden: number, row: number) => void {
    const { dtype, group, device, roundings = 1 } = this.#options;
    const { headDim } = this.store.layer;
    const weightRoundoff = device.kind === 'cuda' ? roundings * unitRoundoff[dtype] : 0;
    const heads = (this.heads[slot] ?? []).map((head) => ({ count: head.count, attention: head.attention() }));
    return (hidden, row) => {
      heads.forEach(({ count, attention }, kvHead) => {
        for (let queryHead = kvHead * group; queryHead < (kvHead + 1) * group; queryHead++) {
          const first = (row * heads.length * group + queryHead) * headDim;
          const wanted = attention(queries.subarray(first, first + headDim), count - hidden, weightRoundoff);
          const got = Float64Array.from(bits.subarray(first, first + headDim));
          expect(excess(wanted, got, device.kind === 'cuda' ? dtype : 'f32')).toBeLessThanOrEqual(0);
        }
      });
    };
  }

  finishPrefill(slot: number, prune?: (head: Head) => void): void {
    this.store.finishPrefill?.(this.stream, slot);
    if (prune) this.heads[slot]?.forEach(prune);
  }

  async #step(
    entries: readonly RowBatchEntry[],
    phase: 'prefill' | 'decode',
    prune?: (head: Head) => void,
  ) {
    const { device, random, dtype, group, recorded = false } = this.#options;
    const { kvHeads, headDim } = this.store.layer;
    const { store, stream } = this;
    const batch = createRowBatch(device, stream, entries);
    const rows = batch.rows;
    const [keys, values] = [
      random.elements(dtype, rows * kvHeads * headDim),
      random.elements(dtype, rows * kvHeads * headDim),
    ];
    const pruneAll = () => {
      if (prune) for (const { slot } of entries) this.heads[slot]?.forEach(prune);
    };
    pruneAll();
    let first = 0;
    for (const { slot, rows: count } of entries) {
      const held = this.heads[slot] ?? [];
      held.forEach((head, kvHead) => {
        head.append('keys', rowsOfHead(keys, { first, count, kvHeads, kvHead, headDim }));
        head.append('values', rowsOfHead(values, { first, count, kvHeads, kvHead, headDim }));
      });
      first += count;
    }
    if (phase === 'prefill') pruneAll();

    const rowTensor = (elements: Uint16Array) =>
      device.tensor(dtype, kvAxes, [rows, kvHeads, headDim], elements);
    const shape = [rows, kvHeads * group, headDim] as const;
    const elements = random.elements(dtype, rows * kvHeads * group * headDim);
    const query = device.tensor(dtype, axes, shape, elements);
    const output = device.tensor(device.kind === 'cuda' ? dtype : 'f32', axes, shape);
    const scale = headDim ** -0.5;
    const call = { batch, keys: rowTensor(keys), values: rowTensor(values) };
    const answer = () => {
      store.append(stream, call);
      store.startDecode(stream, { batch, query, output, scale })();
    };
    store.prepare(stream, batch);
    if (phase === 'prefill') store.append(stream, call);
    else if (recorded) {
      using recording = stream.record(answer);
      stream.replay(recording);
    } else answer();
    store.advance(batch);
    if (phase === 'prefill') {
      const rope = ropeDescription({ headDim, theta: 10_000 });
      this.#prefill.attend(stream, {
        ...call,
        store,
        state: undefined,
        endsPrompt: entries.map(() => false),
        query,
        output,
        scale,
        rope,
      });
    }
    const bits = Float32Array.from(decode(output.dtype, await output.read(stream)));
    for (const tensor of [batch, call.keys, call.values, query, output]) tensor.dispose();
    return { queries: decode(dtype, elements), bits };
  }
}

interface HeadRows {
  readonly first: number;
  readonly count: number;
  readonly kvHeads: number;
  readonly kvHead: number;
  readonly headDim: number;
}

/** `[row, dim]`: some rows of one head out of `[token, kvHead, dim]`. */
function rowsOfHead(elements: Uint16Array, { first, count, kvHeads, kvHead, headDim }: HeadRows): Uint16Array {
  const rows = new Uint16Array(count * headDim);
  for (let row = 0; row < count; row++) {
    const from = ((first + row) * kvHeads + kvHead) * headDim;
    rows.set(elements.subarray(from, from + headDim), row * headDim);
  }
  return rows;
}
