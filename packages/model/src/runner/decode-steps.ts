import { CapabilityError, embedding } from '@kv/sparse-core';
import type { FloatDType, Recording, RowBatch, Stream, TensorHandle } from '@kv/sparse-core';
import { entriesOf, madeTogether } from '@kv/sparse-core/native';

import { enqueueFinalNorm, enqueueLogits } from './head.js';
import type { Logits, NormedRows } from './head.js';
import type { LayerRows, LayerRunner } from './layer-runner.js';
import type { BatchEntry, DeviceIds } from './batch-entry.js';
import { prepareLayers } from './prepare-layers.js';
import type { RunnerModel } from './runner-model.js';
import type { LayerScratch, Scratch } from './scratch.js';

interface FirstRows {
  readonly normed: NormedRows;
  readonly logits: Logits | undefined;
}

/** The runner whose steps are recorded. */
interface StepRunner {
  readonly stream: Stream;
  readonly model: RunnerModel;
  readonly activations: FloatDType;
  readonly maxBatchRows: number;
  readonly deterministic: boolean;
}

/**
 * Steps of more sequences are recorded up to the head, which writes to the caller's logits. With so few, copying logits takes less
 * than a head that cannot start before a recording has ended (H200).
 */
const mostCopied = 8;

/** One token more of up to `size` sequences, from their ids to their logits, recorded. */
class DecodeStep implements Disposable {
  readonly #runner: StepRunner;
  readonly #layers: readonly LayerRunner[];
  readonly #size: number;
  /** The tokens, slots and positions of a step's rows, and where those of each entry begin, one behind the other. */
  readonly #input: TensorHandle<'i32', readonly ['value']>;
  readonly #ids: DeviceIds;
  readonly #rows: RowBatch;
  readonly #normed: NormedRows;
  /** The logits of all rows, where the head is recorded. */
  readonly #logits: Logits | undefined;
  /** By their number: steps of as many sequences follow each other. */
  readonly #firstRows = new Map<number, FirstRows>();
  /** Ids of rows that follow each other, likewise. */
  readonly #idRows = new Map<string, DeviceIds>();
  readonly #recording: Recording;
  /** The step of sequences that are dense in every layer, where all stores have one of their own. */
  readonly #dense: Recording | undefined;
  readonly #owned: Disposable[] = [];
  disposed = false;

  /** @throws CapabilityError when the store does what cannot be recorded; OutOfMemoryError */
  constructor(runner: StepRunner, layers: readonly LayerRunner[], scratch: LayerScratch, size: number) {
    this.#runner = runner;
    this.#layers = layers;
    this.#size = size;
    const { stream, activations, model, deterministic } = runner;
    const { device, config } = model;
    const own = <Kind extends Disposable>(owned: Kind): Kind => {
      this.#owned.push(owned);
      return owned;
    };
    try {
      this.#input = own(device.tensor('i32', ['value'], [4 * size + 1]));
      const part = <Axis extends string>(start: number, axis: Axis, count = size): TensorHandle<'i32', readonly [Axis]> =>
        this.#input.slice('value', start, start + count).view([axis], [count]);
      this.#ids = part(0, 'token');
      this.#rows = {
        entries: [],
        rows: size,
        slots: part(size, 'batch'),
        positions: part(2 * size, 'token'),
        queryStart: part(3 * size, 'boundary', size + 1),
        dispose: () => undefined,
        [Symbol.dispose]: () => undefined,
      };
      // What kernel a row goes through follows from the number of rows.
      const count = deterministic ? undefined : part(4 * size, 'row', 1);
      const each = Int32Array.from({ length: size }, (_, index) => index);
      const chosen = own(device.tensor('i32', ['row'], [size], each));
      const hidden = own(device.tensor(activations, ['token', 'hidden'], [size, config.hiddenSize]));
      const normed = own(device.tensor('f32', ['row', 'hidden'], [size, config.hiddenSize]));
      this.#normed = normed;
      if (deterministic || size <= mostCopied) {
        this.#logits = own(device.tensor('f32', ['row', 'vocabulary'], [size, config.vocabularySize]));
      }
      const record = (dense: boolean): Recording =>
        stream.record(() => {
          const rows: LayerRows = { rows: this.#rows, hidden, count };
          embedding(stream, { ids: this.#ids, table: model.weights.embedding, output: hidden, outside: 'nan' });
          for (const layer of layers) layer.enqueueDecode(rows, scratch, dense);
          enqueueFinalNorm(stream, model, { hidden, chosen, normed });
          if (this.#logits) enqueueLogits(stream, model, { normed, logits: this.#logits, count });
        });
      this.#recording = own(record(false));
      if (layers.every(({ store }) => store.decodeDense !== undefined)) this.#dense = own(record(true));
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  /**
   * Enqueues the step for sequences whose turn it is.
   * @throws OutOfMemoryError when the cache has no room; nothing is enqueued then
   */
  replay(entries: readonly BatchEntry[]): Logits {
    const { stream, model } = this.#runner;
    const count = entries.length;
    const each = entries.map(({ sequence }) => ({ slot: sequence.slot, position: sequence.length, rows: 1 }));
    // Checked once, for all layers.
    const rows: RowBatch = { ...this.#rows, entries: entriesOf('step', { entries: each }) };
    prepareLayers(stream, this.#layers, rows);
    return madeTogether((own) => {
      const logits = own(model.device.tensor('f32', ['row', 'vocabulary'], [count, model.config.vocabularySize]));
      stream.write(this.#input, this.#inputOf(entries));
      this.#copyIds(entries);
      stream.replay(this.#recordingFor(entries));
      for (const { store } of this.#layers) store.advance(rows);
      this.#score(logits);
      return logits;
    });
  }

  /** Enqueues what gives the logits of the first rows. */
  #score(logits: Logits): void {
    const { stream, model } = this.#runner;
    const first = this.#first(logits.shape[0]);
    if (first.logits) stream.copy(first.logits, logits);
    else enqueueLogits(stream, model, { normed: first.normed, logits });
  }

  #first(count: number): FirstRows {
    const first = this.#firstRows.get(count) ?? {
      normed: this.#normed.slice('row', 0, count),
      logits: this.#logits?.slice('row', 0, count),
    };
    this.#firstRows.set(count, first);
    return first;
  }

  /** Asked when every layer has made room, which is when tokens may cease to be dense. */
  #recordingFor(entries: readonly BatchEntry[]): Recording {
    if (this.#dense === undefined) return this.#recording;
    const slots = entries.map(({ sequence }) => sequence.slot);
    return this.#layers.every(({ store }) => store.denseBlocks(slots) !== undefined) ? this.#dense : this.#recording;
  }

  /** Ids in device memory that follow each other there, as a sampled step's do, are one copy. */
  #copyIds(entries: readonly BatchEntry[]): void {
    const { stream } = this.#runner;
    let first = 0;
    while (first < entries.length) {
      const ids = idsOnDevice(entries, first);
      if (ids.length > 0) stream.copy(ids, this.#rowsOfIds(first, first + ids.length));
      first += ids.length + 1; // behind them are no ids, or those of the host
    }
  }

  #rowsOfIds(first: number, end: number): DeviceIds {
    const name = `${first} ${end}`;
    const rows = this.#idRows.get(name) ?? this.#ids.slice('token', first, end);
    this.#idRows.set(name, rows);
    return rows;
  }

  /** Entries behind those given have no rows. Kernels want a slot of each, and none twice: they name the unused ones. */
  #inputOf(entries: readonly BatchEntry[]): Int32Array {
    const size = this.#size;
    const input = new Int32Array(4 * size + 1);
    entries.forEach(({ sequence, ids }, index) => {
      if (!('dtype' in ids)) input[index] = ids[0] ?? 0;
      input[size + index] = sequence.slot;
      input[2 * size + index] = sequence.length;
      input[3 * size + index] = index;
    });
    input.fill(entries.length, 3 * size + entries.length);
    const used = new Set(entries.map(({ sequence }) => sequence.slot));
    for (let index = entries.length, slot = 0; index < size; slot += 1) {
      if (!used.has(slot)) input[size + index++] = slot;
    }
    return input;
  }

  [Symbol.dispose](): void {
    this.disposed = true;
    for (const owned of this.#owned) owned[Symbol.dispose]();
  }
}

/** The ids of the entries from `first` on, up to one whose ids are in host memory. */
function idsOnDevice(entries: readonly BatchEntry[], first: number): DeviceIds[] {
  const ids: DeviceIds[] = [];
  for (const entry of entries.slice(first)) {
    if (!('dtype' in entry.ids)) break;
    ids.push(entry.ids);
  }
  return ids;
}

/**
 * The recorded steps of a runner, of 1, 2, 4, 8, … sequences up to all of them, each made when it is first asked for. A
 * step of another number is the next larger one, with entries that have no rows.
 */
export class DecodeSteps implements Disposable {
  readonly #runner: StepRunner;
  readonly #layers: readonly LayerRunner[];
  readonly #scratch: Scratch;
  readonly #most: number;
  readonly #steps = new Map<number, DecodeStep>();
  #recordable = true;

  constructor(runner: StepRunner, layers: readonly LayerRunner[], scratch: Scratch, sequences: number) {
    this.#runner = runner;
    this.#layers = layers;
    this.#scratch = scratch;
    this.#most = Math.min(sequences, runner.maxBatchRows);
  }

  /** The recorded step for these entries; undefined when they are no step of answers alone, or cannot be recorded. */
  of(entries: readonly BatchEntry[]): DecodeStep | undefined {
    const count = entries.length;
    const distinct = new Set(entries.map(({ sequence }) => sequence)).size === count;
    if (!this.#recordable || count < 1 || count > this.#most || !distinct) return undefined;
    if (entries.some(({ phase }) => phase !== 'decode')) return undefined;
    const size = this.#runner.deterministic ? this.#most : Math.min(2 ** Math.ceil(Math.log2(count)), this.#most);
    let step = this.#steps.get(size);
    if (step === undefined) {
      step = this.#record(size);
      if (step !== undefined) this.#steps.set(size, step);
    }
    return step;
  }

  /** A step that `of` gave, when it is its turn: recorded anew where its stream has failed since. */
  current(step: DecodeStep, entries: readonly BatchEntry[]): DecodeStep {
    return (step.disposed ? this.of(entries) : undefined) ?? step;
  }

  /** Steps are recorded anew, on the stream that the runner has then. */
  forget(): void {
    for (const step of this.#steps.values()) step[Symbol.dispose]();
    this.#steps.clear();
  }

  [Symbol.dispose](): void {
    this.forget();
  }

  #record(size: number): DecodeStep | undefined {
    try {
      return new DecodeStep(this.#runner, this.#layers, this.#scratch.forRows(size), size);
    } catch (error) {
      if (!(error instanceof CapabilityError) || this.#runner.deterministic) throw error;
      this.#recordable = false;
      return undefined;
    }
  }
}
