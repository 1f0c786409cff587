import { CapabilityError, InvalidValueError, linear, rmsNorm } from '@kv/sparse-core';
import type {
  FloatDType,
  KvBytes,
  KvCapacity,
  KvPolicy,
  KvSelector,
  KvStore,
  PrefillState,
  RopeDescription,
  RowBatch,
  Stream,
  TensorHandle,
  TokenSelection,
} from '@kv/sparse-core';
import { expectObject, nativeOf } from '@kv/sparse-core/native';

import type { ModelConfig } from '../config/model-config.js';
import type { LayerWeights } from '../weights/model-weights.js';
import type { BatchChunk, ChunkEntry, ChunkPart } from './batch-chunk.js';
import type { ModelBatch } from './model-batch.js';
import { RecentQueries } from './recent-queries.js';
import type { HeadRows, LayerScratch } from './scratch.js';
import type { Sequence } from './sequence.js';

export interface LayerParts {
  /** Whose stream it is that work is enqueued on. */
  readonly runner: { readonly stream: Stream };
  readonly config: ModelConfig;
  readonly weights: LayerWeights;
  readonly policy: KvPolicy;
  readonly store: KvStore;
  readonly rope: RopeDescription;
  /** `rope.inverseFrequencies` on the device, `[pair]`. */
  readonly inverseFrequencies: TensorHandle<'f32', readonly ['pair']>;
}

/** Rows on their way through the layers, and whose they are. */
export interface LayerRows {
  readonly rows: RowBatch;
  /** `[token, hidden]` */
  readonly hidden: TensorHandle<FloatDType, readonly ['token', 'hidden']>;
  /** i32 `[row]`: how many of them an entry has, where others only fill up a recorded step. Default: all. */
  readonly count?: TensorHandle<'i32', readonly ['row']> | undefined;
}

/**
 * One transformer layer with its cache:
 * `h += output(attention(rope(qkv(norm(h)))))`, then `h += down(silu(gate(norm(h))) ⊙ up(norm(h)))`.
 */
export class LayerRunner implements Disposable {
  readonly store: KvStore;
  readonly #parts: LayerParts;
  readonly #scale: number;
  /** By slot; only while a policy that selects tokens is reading a prompt. */
  readonly #recentQueries = new Map<number, RecentQueries>();
  /** What the policy's prefill attention keeps between chunks. */
  #prefillState: PrefillState | undefined;

  constructor(parts: LayerParts) {
    this.store = parts.store;
    this.#parts = parts;
    this.#scale = 1 / Math.sqrt(parts.config.headDim);
  }

  get #stream(): Stream {
    return this.#parts.runner.stream;
  }

  /** @throws what the policy's prefill attention throws when it has no room for what it keeps */
  open(capacity: KvCapacity): void {
    this.#prefillState = this.#parts.policy.prefill.open?.(this.store.layer, capacity);
  }

  /** Bytes of the store, and of what the prefill attention keeps. */
  bytes(): KvBytes[] {
    const { store } = this;
    return this.#prefillState ? [store.bytes(), this.#prefillState.bytes()] : [store.bytes()];
  }

  /** Enqueues the layer for the rows of a chunk of a batch. Its store has made room for them. */
  async run({ hidden: all, reports }: ModelBatch, chunk: BatchChunk, scratch: LayerScratch): Promise<void> {
    const { rows } = chunk;
    const hidden = all.slice('token', chunk.firstRow, chunk.firstRow + rows.rows);
    this.#append({ rows, hidden }, scratch);
    this.store.advance(rows);
    await this.#attend(chunk, scratch, reports);
    this.#feedForward({ hidden }, scratch);
  }

  /**
   * The same for one row of an answer of each sequence, but the store does not count it: this may be recorded.
   * @param dense whether all that the sequences hold is dense, where the store has `decodeDense`
   */
  enqueueDecode(rows: LayerRows, scratch: LayerScratch, dense: boolean): void {
    const stream = this.#stream;
    this.#append(rows, scratch);
    const { query, attended: output } = scratch;
    const call = { batch: rows.rows, query, output, scale: this.#scale };
    if (dense) this.store.decodeDense?.(stream, call);
    else this.store.startDecode(stream, call)();
    this.#feedForward(rows, scratch);
  }

  /**
   * Makes a new sequence hold what another does, as far as it has the same tokens.
   * @throws OutOfMemoryError; CapabilityError when the store cannot be copied, or not cut there
   */
  fork(from: Sequence, to: Sequence): void {
    const { store } = this;
    const { policy } = this.#parts;
    const stream = this.#stream;
    if (store.copy === undefined) {
      throw new CapabilityError(
        `The store '${store.name}' cannot copy a sequence. Read the text again instead of forking.`,
        { subject: 'store', given: store.name, wanted: 'a store with copy()' },
      );
    }
    if (this.#prefillState && to.length < from.promptEnd) {
      throw new CapabilityError(
        `The prefill attention '${policy.prefill.name}' keeps what it found in a prompt, which cannot be cut. ` +
          `Fork ${from.promptEnd} tokens or more, or read the text again.`,
        { subject: 'tokens', given: to.length, wanted: from.promptEnd },
      );
    }
    store.copy(stream, from.slot, to.slot, from.length - to.length);
    this.#prefillState?.copy(stream, from.slot, to.slot);
    const recent = this.#recentQueries.get(from.slot);
    if (to.select === undefined || recent === undefined || recent.end > to.length) return;
    const { queries, position } = recent;
    this.#recent(to.slot, queries.dtype, to.select.observationWindow).push(stream, queries, position);
  }

  /** Forgets a sequence and returns its memory. */
  release(slot: number): void {
    const stream = this.#stream;
    this.store.release(stream, slot);
    this.#prefillState?.release(stream, slot);
    this.#recentQueries.get(slot)?.dispose();
    this.#recentQueries.delete(slot);
  }

  [Symbol.dispose](): void {
    for (const queries of this.#recentQueries.values()) queries.dispose();
    this.#prefillState?.dispose();
    this.store.dispose();
  }

  /** `qkv(norm(h))`, with the rotated keys and the values behind those of their sequences. */
  #append({ rows, hidden, count }: LayerRows, scratch: LayerScratch): void {
    const { config, weights, inverseFrequencies } = this.#parts;
    const stream = this.#stream;
    const { convention, attentionScale } = this.#parts.rope;
    const { normed, query, key } = scratch;
    const epsilon = config.rmsNormEpsilon;
    rmsNorm(stream, { input: hidden, weight: weights.inputNorm, output: normed, epsilon });
    linear(stream, {
      input: normed,
      rows: count,
      layers: [
        { ...weights.query, output: scratch.queryRows },
        { ...weights.key, output: scratch.keyRows },
        { ...weights.value, output: scratch.valueRows },
      ],
    });
    const { queryNorm, keyNorm } = weights;
    if (queryNorm) rmsNorm(stream, { input: query, weight: queryNorm, output: query, epsilon });
    if (keyNorm) rmsNorm(stream, { input: key, weight: keyNorm, output: key, epsilon });
    const turn = { query, positions: rows.positions, inverseFrequencies, convention, attentionScale };
    this.store.append(stream, { batch: rows, keys: key, values: scratch.value, rope: turn });
  }

  #feedForward({ hidden, count: rows }: Omit<LayerRows, 'rows'>, scratch: LayerScratch): void {
    const { config, weights } = this.#parts;
    const stream = this.#stream;
    const { normed, gate, up } = scratch;
    linear(stream, { input: scratch.attendedRows, rows, ...weights.output, output: hidden, accumulate: true });
    const epsilon = config.rmsNormEpsilon;
    rmsNorm(stream, { input: hidden, weight: weights.postAttentionNorm, output: normed, epsilon });
    const layers = [
      { ...weights.gate, output: gate },
      { ...weights.up, output: up },
    ];
    linear(stream, { input: normed, rows, layers, swiglu: true });
    linear(stream, { input: gate, rows, ...weights.down, output: hidden, accumulate: true });
  }

  async #attend({ decode, prefill }: BatchChunk, { query, key, value, attended }: LayerScratch, reports: ModelBatch['reports']): Promise<void> {
    const { policy, store, rope: description } = this.#parts;
    const stream = this.#stream;
    const scale = this.#scale;
    // A store may compute part of a decode step elsewhere, meanwhile this stream computes the prompts.
    const finishDecode =
      decode &&
      store.startDecode(stream, {
        batch: decode.rows,
        query: rowsOf(decode, query),
        output: rowsOf(decode, attended),
        scale,
      });
    if (prefill) {
      const { report } = policy.prefill.attend(stream, {
        store,
        state: this.#prefillState,
        batch: prefill.rows,
        endsPrompt: prefill.entries.map(({ phase }) => phase === 'prefill-end'),
        query: rowsOf(prefill, query),
        keys: rowsOf(prefill, key),
        values: rowsOf(prefill, value),
        rope: description,
        output: rowsOf(prefill, attended),
        scale,
      });
      // Nobody has to wait for it, so nobody may see that it failed.
      Promise.resolve(report).catch(() => undefined);
      reports.push(report);
      await this.#finishPrompts(prefill, query);
    }
    finishDecode?.();
  }

  /** Lets the policy drop tokens of the prompts that are complete. */
  async #finishPrompts(prefill: ChunkPart, query: LayerScratch['query']): Promise<void> {
    let row = prefill.firstRow;
    for (const entry of prefill.entries) {
      const first = row;
      row += entry.rows;
      // Given up while the selection of another was waited for: its slot may be another's.
      if (entry.sequence.disposed || entry.sequence.failure) continue;
      try {
        await this.#finishChunk(entry, query.slice('token', first, row));
      } catch (error) {
        entry.sequence.fail(error);
      }
    }
  }

  async #finishChunk({ sequence, phase, position, rows }: ChunkEntry, queries: LayerScratch['query']): Promise<void> {
    const { store } = this.#parts;
    const stream = this.#stream;
    const { slot, select } = sequence;
    if (select) this.#recent(slot, queries.dtype, select.observationWindow).push(stream, queries, position);
    if (phase !== 'prefill-end') return;
    await this.#select(sequence, position + rows);
    if (!sequence.disposed) store.finishPrefill?.(stream, slot);
  }

  async #select(sequence: Sequence, tokens: number): Promise<void> {
    const { store } = this.#parts;
    const stream = this.#stream;
    const { slot, select } = sequence;
    const recent = this.#recentQueries.get(slot);
    if (select === undefined || recent === undefined) return;
    const reading = store.makeDense?.(stream, slot);
    if (reading) {
      const makeDense = await reading;
      if (sequence.disposed) return;
      makeDense();
    }
    const call = { store, slot, lastQueries: recent.queries, scale: this.#scale, tokens };
    const selection = await select.select(stream, call);
    if (selection !== undefined) {
      expectObject(select.name, 'selection', selection);
      nativeOf(select.name, 'indices', selection.indices, stream);
    }
    try {
      // The sequence may have been given up meanwhile, and its slot be another's.
      if (selection !== undefined && !sequence.disposed) this.#keep(sequence, select, selection);
    } finally {
      selection?.indices.dispose();
      recent.dispose();
    }
    if (this.#recentQueries.get(slot) === recent) this.#recentQueries.delete(slot);
  }

  /** The device says later whether the selection was in order: nothing waits for it, and no other sequence suffers. */
  #keep(sequence: Sequence, { name }: KvSelector, selection: TokenSelection): void {
    const { store } = this.#parts;
    const stream = this.#stream;
    using outcomes = stream.device.tensor('i32', ['kvHead'], [store.layer.kvHeads]);
    store.keep(stream, sequence.slot, selection, outcomes);
    const check = (refused: Int32Array): void => {
      const kvHead = refused.findIndex((outcome) => outcome !== 0);
      if (kvHead < 0) return;
      const error = new InvalidValueError(
        `The selection of '${name}' for kv head ${kvHead} of layer ${store.layer.index} does not ascend within what the ` +
          'slot holds. Give indices into the kept tokens, ascending and without repeats.',
        { subject: 'indices', given: name },
      );
      sequence.fail(error);
    };
    // That the stream failed, every wait says.
    outcomes.read().then(check, () => undefined);
  }

  #recent(slot: number, dtype: FloatDType, window: number): RecentQueries {
    let recent = this.#recentQueries.get(slot);
    if (recent === undefined) {
      const { config } = this.#parts;
      recent = new RecentQueries(this.#stream.device, dtype, window, config.queryHeads, config.headDim);
      this.#recentQueries.set(slot, recent);
    }
    return recent;
  }
}

function rowsOf<Head extends string>({ firstRow, rows }: ChunkPart, tensor: HeadRows<Head>): HeadRows<Head> {
  if (rows.rows === tensor.shape[0]) return tensor;
  return tensor.slice('token', firstRow, firstRow + rows.rows);
}
