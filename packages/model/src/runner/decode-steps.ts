import { CapabilityError, embedding } from '@kv/sparse-core';
import type { FloatDType, Recording, RowBatch, TensorHandle } from '@kv/sparse-core';
import { madeTogether } from '@kv/sparse-core/native';

import { enqueueHead } from './head.js';
import type { Logits } from './head.js';
import type { HiddenRows, LayerRunner } from './layer-runner.js';
import type { BatchEntry, DeviceIds } from './model-batch.js';
import { prepareLayers } from './prepare-layers.js';
import type { Runner } from './runner.js';
import type { LayerScratch, Scratch } from './scratch.js';

/** The most sequences of a recorded step: each number of them is a recording, and on CUDA a graph, of its own. */
const mostSequences = 16;

/** Tensors of all recorded steps; a step of fewer sequences uses a part of each. */
class StepTensors implements Disposable {
  /** The tokens, slots and positions of a step's rows, one behind the other. */
  readonly input: TensorHandle<'i32', readonly ['value']>;
  /** 0, 1, 2, …: where the rows of each entry begin, and the rows that go through the head. */
  readonly ascending: TensorHandle<'i32', readonly ['boundary']>;
  readonly hidden: TensorHandle<FloatDType, readonly ['token', 'hidden']>;
  readonly normed: TensorHandle<'f32', readonly ['row', 'hidden']>;
  readonly logits: Logits;

  readonly #owned: Disposable[] = [];

  constructor({ activations, model: { device, config } }: Runner, sequences: number) {
    const own = <Kind extends Disposable>(tensor: Kind): Kind => {
      this.#owned.push(tensor);
      return tensor;
    };
    const ascending = Int32Array.from({ length: sequences + 1 }, (_, index) => index);
    try {
      this.input = own(device.tensor('i32', ['value'], [3 * sequences]));
      this.ascending = own(device.tensor('i32', ['boundary'], [sequences + 1], ascending));
      this.hidden = own(device.tensor(activations, ['token', 'hidden'], [sequences, config.hiddenSize]));
      this.normed = own(device.tensor('f32', ['row', 'hidden'], [sequences, config.hiddenSize]));
      this.logits = own(device.tensor('f32', ['row', 'vocabulary'], [sequences, config.vocabularySize]));
    } catch (error) {
      this[Symbol.dispose]();
      throw error;
    }
  }

  [Symbol.dispose](): void {
    for (const tensor of this.#owned) tensor[Symbol.dispose]();
  }
}

/** One token more of a number of sequences, from their ids to their logits, recorded. */
class DecodeStep implements Disposable {
  readonly #runner: Runner;
  readonly #layers: readonly LayerRunner[];
  readonly #input: StepTensors['input'];
  /** Of each entry. */
  readonly #ids: readonly DeviceIds[];
  readonly #rows: RowBatch;
  readonly #logits: Logits;
  readonly #recording: Recording;

  /** @throws CapabilityError when the store does what cannot be recorded */
  constructor(runner: Runner, layers: readonly LayerRunner[], scratch: LayerScratch, tensors: StepTensors, count: number) {
    this.#runner = runner;
    this.#layers = layers;
    this.#input = tensors.input.slice('value', 0, 3 * count);
    const part = <Axis extends string>(index: number, axis: Axis): TensorHandle<'i32', readonly [Axis]> =>
      tensors.input.slice('value', index * count, (index + 1) * count).view([axis], [count]);
    const ids = part(0, 'token');
    this.#ids = Array.from({ length: count }, (_, index) => ids.slice('token', index, index + 1));
    this.#rows = {
      entries: [],
      rows: count,
      slots: part(1, 'batch'),
      queryStart: tensors.ascending.slice('boundary', 0, count + 1),
      positions: part(2, 'token'),
      dispose: () => undefined,
      [Symbol.dispose]: () => undefined,
    };
    this.#logits = tensors.logits.slice('row', 0, count);
    const hidden = tensors.hidden.slice('token', 0, count);
    const chosen = tensors.ascending.slice('boundary', 0, count).view(['row'], [count]);
    const normed = tensors.normed.slice('row', 0, count);
    const { stream, model } = runner;
    this.#recording = stream.record(() => {
      const rows: HiddenRows = { rows: this.#rows, hidden };
      embedding(stream, { ids, table: model.weights.embedding, output: hidden, outside: 'nan' });
      for (const layer of layers) layer.enqueueDecode(rows, scratch);
      enqueueHead(stream, model, { hidden, chosen, normed, logits: this.#logits });
    });
  }

  /**
   * Enqueues the step for sequences whose turn it is.
   * @throws OutOfMemoryError when the cache has no room; nothing is enqueued then
   */
  replay(entries: readonly BatchEntry[]): Logits {
    const { stream, model } = this.#runner;
    const count = entries.length;
    const rows: RowBatch = {
      ...this.#rows,
      entries: entries.map(({ sequence }) => ({ slot: sequence.slot, position: sequence.length, rows: 1 })),
    };
    prepareLayers(stream, this.#layers, rows);
    const input = new Int32Array(3 * count);
    entries.forEach(({ sequence, ids }, index) => {
      if (!('dtype' in ids)) input[index] = ids[0] ?? 0;
      input[count + index] = sequence.slot;
      input[2 * count + index] = sequence.length;
    });
    return madeTogether((own) => {
      const logits = own(model.device.tensor('f32', ['row', 'vocabulary'], this.#logits.shape));
      stream.write(this.#input, input);
      this.#ids.forEach((target, index) => {
        const ids = entries[index]?.ids;
        if (ids !== undefined && 'dtype' in ids) stream.copy(ids, target);
      });
      stream.replay(this.#recording);
      for (const { store } of this.#layers) store.advance(rows);
      stream.copy(this.#logits, logits);
      return logits;
    });
  }

  [Symbol.dispose](): void {
    this.#recording.dispose();
  }
}

/** The recorded steps of a runner, made when the first of their size is asked for. */
export class DecodeSteps implements Disposable {
  readonly #runner: Runner;
  readonly #layers: readonly LayerRunner[];
  readonly #scratch: Scratch;
  readonly #most: number;
  readonly #steps = new Map<number, DecodeStep>();
  #tensors: StepTensors | undefined;
  #recordable = true;

  constructor(runner: Runner, layers: readonly LayerRunner[], scratch: Scratch, sequences: number) {
    this.#runner = runner;
    this.#layers = layers;
    this.#scratch = scratch;
    this.#most = Math.min(sequences, mostSequences, runner.maxBatchRows);
  }

  /** The recorded step for these entries; undefined when they are no step of answers alone, or cannot be recorded. */
  of(entries: readonly BatchEntry[]): DecodeStep | undefined {
    const count = entries.length;
    const distinct = new Set(entries.map(({ sequence }) => sequence)).size === count;
    if (!this.#recordable || count < 1 || count > this.#most || !distinct) return undefined;
    if (entries.some(({ phase }) => phase !== 'decode')) return undefined;
    let step = this.#steps.get(count);
    if (step === undefined) {
      step = this.#record(count);
      if (step !== undefined) this.#steps.set(count, step);
    }
    return step;
  }

  [Symbol.dispose](): void {
    for (const step of this.#steps.values()) step[Symbol.dispose]();
    this.#tensors?.[Symbol.dispose]();
  }

  #record(count: number): DecodeStep | undefined {
    this.#tensors ??= new StepTensors(this.#runner, this.#most);
    try {
      return new DecodeStep(this.#runner, this.#layers, this.#scratch.forRows(count), this.#tensors, count);
    } catch (error) {
      if (!(error instanceof CapabilityError)) throw error;
      this.#recordable = false;
      return undefined;
    }
  }
}
