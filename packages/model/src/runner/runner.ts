import { DisposedError, embedding, InvalidValueError } from '@kv/sparse-core';
import type {
  FloatDType,
  KvBytes,
  KvDemand,
  KvPolicy,
  KvSelector,
  Stream,
} from '@kv/sparse-core';
import { expectOptions, expectSelector, type KvResidency, kvResidency, listOf, madeTogether } from '@kv/sparse-core/native';

import { expectWholeNumber } from '../expect-whole-number.js';
import { BatchRuns } from './batch-runs.js';
import { checkEntries, expectPrefix, expectRoom } from './check-entries.js';
import { createLayers } from './create-layers.js';
import { DecodeSteps } from './decode-steps.js';
import { enqueueFinalNorm, enqueueLogits } from './head.js';
import type { Logits } from './head.js';
import type { LayerRunner } from './layer-runner.js';
import { leave } from './batch-entry.js';
import { ModelBatch } from './model-batch.js';
import type { BatchEntry } from './batch-entry.js';
import { OpenSequences } from './open-sequences.js';
import { demandOf, evictLayers, limitLayers, uncuttablePart } from './residency.js';
import { expectModel } from './runner-model.js';
import type { RunnerModel } from './runner-model.js';
import { type ForkOptions, type RunnerOptions, runnerSettings, type SequenceOptions } from './runner-options.js';
import { Scratch } from './scratch.js';
import type { Sequence } from './sequence.js';
import { copyIds, countIds } from './given-ids.js';
import { sumOfBytes } from './sum-of-bytes.js';
import { WorkLog } from './work-log.js';

/**
 * Runs a model layer by layer over a cache of its own. One batch may mix chunks of prompts and tokens of
 * answers, and may stop between layers while others run: a scheduler's view of a model.
 *
 * Calls enqueue and return; `stream.synchronize()` or reading a tensor waits. If a policy's prefill plans on
 * the host, `runLayers` resolves when its last layer is enqueued.
 */
export class Runner implements Disposable {
  readonly model: RunnerModel;
  readonly policy: KvPolicy;
  readonly contextTokens: number;
  readonly maxBatchRows: number;
  readonly activations: FloatDType;
  readonly deterministic: boolean;
  readonly #layers: readonly LayerRunner[];
  readonly #scratch: Scratch;
  readonly #decodeSteps: DecodeSteps;
  readonly #owned: Disposable[] = [];
  readonly #sequences: OpenSequences;
  readonly #runs: BatchRuns;
  readonly #work = new WorkLog();
  #stream: Stream;
  /** What ended the runner, if it was an error. */
  #failure: Error | undefined;
  /** The working memory serves one batch at a time. */
  #lastRun: Promise<unknown> = Promise.resolve();
  #disposed = false;

  /** Whether it is one, and no look-alike or proxy. */
  static is(value: unknown): value is Runner {
    return typeof value === 'object' && value !== null && #disposed in value;
  }

  /** @throws OutOfMemoryError when cache and working memory do not fit; InvalidValueError */
  constructor(model: RunnerModel, options: RunnerOptions = {}) {
    expectModel(model);
    const { config, device } = model;
    const { policy, rope, sequences, contextTokens, cacheTokens, maxBatchRows, deterministic, activations } = runnerSettings(model, options);
    this.model = model;
    this.policy = policy;
    this.activations = activations;
    this.deterministic = deterministic;
    this.contextTokens = contextTokens;
    this.maxBatchRows = maxBatchRows;
    this.#sequences = new OpenSequences(sequences, (slot) => {
      for (const layer of this.#layers) layer.release(slot);
    });
    this.#stream = this.#openStream();
    // Weights that lie misaligned in their file were copied on the device's own stream.
    this.#stream.waitFor(device.defaultStream);
    const capacity = {
      device,
      slots: sequences,
      tokensPerSlot: contextTokens,
      tokens: cacheTokens,
      rowDType: activations,
      batchRows: maxBatchRows,
      answersApart: deterministic,
      prefill: policy.prefill,
    };
    try {
      this.#scratch = this.#own(new Scratch(device, config, activations, maxBatchRows));
      this.#layers = createLayers(this, capacity, rope, (owned) => this.#own(owned));
      this.#runs = new BatchRuns({ runner: this, layers: this.#layers, scratch: this.#scratch, work: this.#work });
      this.#decodeSteps = this.#own(new DecodeSteps(this, this.#layers, this.#scratch, sequences));
    } catch (error) {
      this.dispose();
      throw error;
    }
  }

  /** Where the runner's work is enqueued: another one after an operation has failed. */
  get stream(): Stream {
    return this.#stream;
  }

  /** Bytes that the cache holds now, with what the prefill attention keeps of prompts that go on. */
  get kvBytes(): KvBytes {
    return sumOfBytes(this.#layers.flatMap((layer) => layer.bytes()));
  }

  /** Bytes that the cache took when the runner was made, in use or not. */
  get kvReserved(): KvBytes {
    return sumOfBytes(this.#layers.map(({ store }) => store.reserved()));
  }

  /** How its store holds blocks in two memories; undefined for one that does not. */
  get residency(): KvResidency | undefined {
    const [first] = this.#layers;
    return first && kvResidency.of(first.store);
  }

  /**
   * The name of what makes of a prompt, when it ends, something else than its tokens were read as: a fork of its beginning is no
   * beginning of another prompt then, or cannot be made. Undefined where every beginning is one.
   */
  get uncuttable(): string | undefined {
    return uncuttablePart(this.policy, this.#layers);
  }

  /** Bytes that one sequence holds, blocks that others share too. */
  kvBytesOf(sequence: Sequence): KvBytes {
    this.#sequences.expectOwn(sequence);
    return sumOfBytes(this.#layers.map(({ store }) => store.bytes([sequence.slot])));
  }

  /**
   * @throws QueueFullError when all sequences are in use; what `setBudget` throws
   * @throws CapabilityError for a selection of prompts that are not dense
   */
  openSequence(options: SequenceOptions = {}): Sequence {
    expectOptions('openSequence', options, { select: true, budgetTokens: true });
    const { select = this.policy.select, budgetTokens } = options;
    expectSelector('openSequence', select, this.policy.prefill);
    const sequence = this.#open(select, new Int32Array(), 0);
    return this.#withBudget(sequence, budgetTokens);
  }

  /**
   * Says how many tokens of each kv head the answers of a sequence read from its next step on.
   * @param budgetTokens at most as many as the store's own budget, which undefined stands for
   * @throws CapabilityError for a store without budgets; InvalidValueError for more than its own, or too few
   */
  setBudget(sequence: Sequence, budgetTokens: number | undefined): void {
    this.assertUsable();
    this.#sequences.expectOwn(sequence);
    if (budgetTokens !== undefined) expectWholeNumber('budgetTokens', budgetTokens, 1, Number.MAX_SAFE_INTEGER);
    if (budgetTokens === sequence.budgetTokens) return;
    limitLayers(this.#stream, this.#layers, sequence, budgetTokens);
    this.#work.enqueued(this.#stream, [sequence]);
  }

  /**
   * Gives back the device memory of what host memory holds of a sequence too. It comes back when it is read: answers are the
   * same.
   * @throws CapabilityError for a store that holds nothing in host memory
   */
  evict(sequence: Sequence): void {
    this.assertUsable();
    this.#sequences.expectOwn(sequence);
    evictLayers(this.#stream, this.#layers, sequence.slot);
    this.#work.enqueued(this.#stream, [sequence]);
  }

  /**
   * What the steps of a sequence read of the device's cache, as far as the device has told; it never waits, and what is asked
   * for arrives behind the next step. `workingSet` is the most of one layer, `hits` and `misses` are sums over the layers.
   * @returns undefined before the first has arrived, and where the store counts nothing
   */
  demand(sequence: Sequence): KvDemand | undefined {
    this.assertUsable();
    this.#sequences.expectOwn(sequence);
    return demandOf(this.#layers, sequence.slot);
  }

  /**
   * A second sequence that holds what the first one does, or its first tokens: a text is read once, and each question
   * about it is asked of a fork. The two share full blocks of the cache, and neither changes what the other holds. A
   * prompt may be forked before it ends, with another selection for each fork.
   * @throws QueueFullError when all sequences are in use; OutOfMemoryError
   * @throws CapabilityError when the policy's store cannot be copied, or not cut there; when `tokens` ends inside of
   *   what a selection was made of
   * @throws InvalidValueError when a batch is between its layers, `sequence` has fewer tokens, or `select` observes more
   *   of the last queries than the selection of `sequence`, which decides how many are at hand
   */
  fork(sequence: Sequence, options: ForkOptions = {}): Sequence {
    this.#sequences.expectOwn(sequence);
    sequence.assertWhole();
    expectOptions('fork', options, { select: true, budgetTokens: true, tokens: true });
    const { select = sequence.select, budgetTokens = sequence.budgetTokens, tokens = sequence.length } = options;
    expectSelector('fork', select, this.policy.prefill);
    expectWholeNumber('tokens of a fork', tokens, 0, sequence.length);
    expectPrefix(this.#layers, sequence, tokens);
    const observed = sequence.select?.observationWindow ?? 0;
    const wanted = select?.observationWindow ?? 0;
    if (wanted > observed) {
      throw new InvalidValueError(
        `${select?.name ?? ''} observes the last ${wanted} queries, and this sequence keeps ${observed}. ` +
          'Open it with a selection that observes as many.',
        { subject: 'observationWindow', given: wanted, wanted: observed },
      );
    }
    const fork = this.#open(select, sequence.ids.subarray(0, tokens), Math.min(tokens, sequence.promptEnd));
    try {
      for (const layer of this.#layers) layer.fork(sequence, fork);
    } catch (error) {
      fork.dispose();
      throw error;
    }
    this.#work.enqueued(this.#stream, [fork]);
    return this.#withBudget(fork, budgetTokens);
  }

  /**
   * Forgets the newest tokens of an answer, so that the sequence holds `length`.
   * @throws InvalidValueError when that would forget tokens of a prompt, or a batch is between its layers
   */
  truncate(sequence: Sequence, length: number): void {
    this.assertUsable();
    this.#sequences.expectOwn(sequence);
    sequence.assertWhole();
    expectWholeNumber('length', length, sequence.promptEnd, sequence.length);
    const tokens = sequence.length - length;
    if (tokens === 0) return;
    for (const { store } of this.#layers) store.truncate(this.#stream, sequence.slot, tokens);
    this.#work.enqueued(this.#stream, [sequence]);
    sequence.truncate(length);
  }

  /**
   * Packs the next tokens of some sequences into a batch. A prompt that is alone in it may have more than `maxBatchRows`.
   * @throws InvalidValueError for no tokens, token ids outside the vocabulary, too many rows of several sequences, one that
   *   would become too long, or a decode entry of more than one token
   * @throws CapabilityError when the sequence would outgrow the model's sliding window
   */
  createBatch(given: readonly BatchEntry[]): ModelBatch {
    const entries = this.#checkEntries('createBatch', given);
    const { device, config } = this.model;
    const { hiddenSize } = config;
    const sizes = { hiddenSize, dtype: this.activations, chunkRows: this.maxBatchRows };
    const batch = new ModelBatch(device, this.#stream, entries, sizes);
    this.#runs.add(batch);
    return batch;
  }

  /**
   * Enqueues a whole step: the embedding, all layers, and the head of each entry's last row. What `createBatch`,
   * `embed`, `runLayers` and `head` do together, but a step of answers alone is recorded once for its number of
   * sequences and then replayed, if the policy's store can be recorded.
   * @returns f32 `[row, vocabulary]`, a row for each entry, which the caller disposes
   * @throws what those four throw
   */
  async step(given: readonly BatchEntry[]): Promise<Logits> {
    const entries = this.#checkEntries('step', given);
    const recorded = this.#decodeSteps.of(entries);
    if (recorded !== undefined) {
      const starts = entries.map(({ sequence }) => sequence.length);
      return await this.#inTurn(() => {
        this.assertUsable();
        entries.forEach(({ sequence }, index) => {
          sequence.assertTurn(entries, starts[index] ?? 0);
        });
        const sequences = entries.map(({ sequence }) => sequence);
        return this.#work.during(this.#stream, sequences, () => {
          const logits = this.#decodeSteps.current(recorded, entries).replay(entries);
          for (const entry of entries) leave(entry);
          return logits;
        });
      });
    }
    using batch = this.createBatch(entries);
    this.embed(batch);
    await this.runLayers(batch, 0, this.#layers.length);
    return this.head(batch);
  }

  /** Enqueues the embedding of a batch's tokens. */
  embed(batch: ModelBatch): void {
    this.#runs.expectNext(batch, -1);
    const { embedding: table } = this.model.weights;
    embedding(this.#stream, { ids: batch.ids, table, output: batch.hidden, outside: 'nan' });
    this.#work.enqueued(this.#stream, [batch]);
    batch.nextLayer = 0;
  }

  /**
   * Enqueues layers `first` to `end - 1` of a batch that has passed the layers before.
   * @throws InvalidValueError when they are not the batch's next layers
   * @throws OutOfMemoryError when the cache has no room; nothing is enqueued then, and the call may be repeated
   * @throws what the policy throws; the batch's sequences are disposed then, since their caches are cut off
   *   between two layers. What fails for one sequence alone, such as its selection, ends that one, whose `failure` says
   *   why, and is thrown when the batch has no other
   */
  async runLayers(batch: ModelBatch, first: number, end: number): Promise<void> {
    await this.#inTurn(async () => {
      this.assertUsable();
      this.#runs.expectNext(batch, first);
      expectWholeNumber('end', end, first + 1, this.#layers.length);
      await this.#runs.advance(batch, end);
    });
  }

  /**
   * Enqueues the next chunks of a batch that is embedded: whole ones, in one layer after the other, while they fit. A prompt of
   * more than `maxBatchRows` has several in each layer, of `maxBatchRows` rows from its first one, so that its result does not
   * depend on where it was interrupted. `batch.nextLayer` and `batch.nextRow` say where it goes on, and that it is at the head.
   * @param tokenLayers rows × layers at most; `batch.nextRows` or more
   * @returns the rows × layers that were enqueued
   * @throws OutOfMemoryError when the cache has no room for a chunk, or the device none for rows that waited in host memory;
   *   chunks before it stay, and the call may be repeated
   * @throws InvalidValueError when the next chunk does not fit, or no layer is left; what `runLayers` throws
   */
  async runSegment(batch: ModelBatch, tokenLayers: number): Promise<number> {
    return await this.#inTurn(async () => {
      this.assertUsable();
      this.#runs.expectOwn(batch);
      batch.assertNext(Math.min(Math.max(batch.nextLayer, 0), this.#layers.length - 1), this.#layers.length);
      expectWholeNumber('tokenLayers', tokenLayers, batch.nextRows, Number.MAX_SAFE_INTEGER);
      return await this.#runs.advance(batch, this.#layers.length, tokenLayers);
    });
  }

  /**
   * Moves the rows of a batch that waits between its layers to host memory, behind what is enqueued. They come back by
   * themselves when it goes on. `batch.bytes` says where they are.
   * @throws OutOfMemoryError when there is no host memory for them; nothing is changed then
   */
  async moveToHost(batch: ModelBatch): Promise<void> {
    this.assertUsable();
    await this.#runs.moveToHost(batch, (move) => this.#inTurn(move));
  }

  /**
   * Enqueues the final norm and the output head of some rows of a batch that has passed all layers.
   * @param given default: the last row of each entry, in the order of `createBatch`
   * @returns f32 `[row, vocabulary]`, which the caller disposes
   */
  head(batch: ModelBatch, given?: readonly number[]): Logits {
    const { config, device } = this.model;
    this.#runs.expectNext(batch, config.layers);
    this.#runs.bringBack(batch);
    if (given === undefined) return this.head(batch, batch.lastRows);
    const rows = listOf('head', 'rows', given, this.maxBatchRows);
    expectWholeNumber('rows of the head', rows.length, 1, this.maxBatchRows);
    for (const row of rows) expectWholeNumber('row', row, 0, batch.rows - 1);
    using chosen = device.tensor('i32', ['row'], [rows.length], Int32Array.from(rows));
    using normed = device.tensor('f32', ['row', 'hidden'], [rows.length, config.hiddenSize]);
    return madeTogether((own) => {
      const logits = own(device.tensor('f32', ['row', 'vocabulary'], [rows.length, config.vocabularySize]));
      enqueueFinalNorm(this.#stream, this.model, { hidden: batch.hidden, chosen, normed });
      enqueueLogits(this.#stream, this.model, { normed, logits });
      return logits;
    });
  }

  /** Returns the cache and the working memory. Sequences of this runner become unusable. */
  dispose(): void {
    if (this.#disposed) return;
    for (const sequence of this.#sequences) sequence.dispose();
    this.#disposed = true;
    for (const owned of this.#owned) owned[Symbol.dispose]();
    this.#stream.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }

  #openStream(): Stream {
    return this.model.device.createStream({
      onFailure: (failure) => {
        this.#recover(failure);
      },
    });
  }

  /**
   * Goes on, on another stream, when an operation has failed. What was enqueued behind it was skipped: sequences whose work
   * is not known to be done end with the failure. No operation writes to what others hold, so that these keep theirs.
   */
  #recover(failure: Error): void {
    if (this.#disposed) return;
    try {
      const failed = this.#stream;
      this.#stream = this.#openStream();
      this.#stream.waitFor(failed, { takesFailure: false });
      failed.dispose();
      this.#work.failed(failed, failure);
      this.#decodeSteps.forget();
      for (const sequence of this.#sequences) {
        if (this.#work.lostBy(sequence) === undefined) continue;
        sequence.fail(failure);
        sequence.dispose();
      }
      this.#sequences.emptyFreeSlots();
    } catch {
      this.#failure = failure;
      this.dispose();
    }
  }

  #own<Kind extends Disposable>(owned: Kind): Kind {
    this.#owned.push(owned);
    return owned;
  }

  async #inTurn<Result>(work: () => Result | Promise<Result>): Promise<Result> {
    const run = this.#lastRun.then(work);
    this.#lastRun = run.catch(() => undefined);
    return await run;
  }

  /**
   * Checks tokens that a sequence is to take, or a new one, with room for `spare` others behind them. A new one can be checked
   * for also when the runner has ended: another like it takes the same.
   * @returns the ids, i32, in memory of their own
   * @throws InvalidValueError for no tokens, ids outside the vocabulary, or more than the context holds
   * @throws CapabilityError when the sequence would outgrow the model's sliding window
   */
  checkTokens(sequence: Sequence | 'new', ids: ArrayLike<number>, spare = 0): Int32Array {
    if (sequence !== 'new') {
      this.assertUsable();
      this.#sequences.expectOwn(sequence);
    }
    const tokens = countIds(ids);
    expectRoom(this, sequence === 'new' ? 0 : sequence.length, tokens, spare);
    return copyIds(ids, tokens, this.model.config.vocabularySize);
  }

  #checkEntries(operation: string, given: readonly BatchEntry[]): BatchEntry[] {
    this.assertUsable();
    return checkEntries(operation, given, this, (sequence) => {
      this.#sequences.expectOwn(sequence);
    });
  }

  #open(select: KvSelector | undefined, ids: Int32Array, promptEnd: number): Sequence {
    this.assertUsable();
    const sequence = this.#sequences.open(select, ids, promptEnd);
    // The slot was emptied before.
    this.#work.enqueued(this.#stream, [sequence]);
    return sequence;
  }

  #withBudget(sequence: Sequence, budgetTokens: number | undefined): Sequence {
    try {
      this.setBudget(sequence, budgetTokens);
      return sequence;
    } catch (error) {
      sequence.dispose();
      throw error;
    }
  }

  /** @throws DisposedError whose cause is what ended it */
  assertUsable(): void {
    if (!this.#disposed) return;
    const cause = this.#failure;
    const why = cause === undefined ? 'was disposed' : `was ended by an error (${cause.message})`;
    throw new DisposedError(`The runner ${why}; create another.`, { subject: 'runner', cause });
  }
}
