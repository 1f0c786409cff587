import { DisposedError, InvalidValueError } from '@kv/sparse-core';
import type { Stream } from '@kv/sparse-core';

import { expectWholeNumber } from '../expect-whole-number.js';
import type { BatchChunk } from './batch-chunk.js';
import { leave } from './batch-entry.js';
import type { LayerRunner } from './layer-runner.js';
import type { ModelBatch } from './model-batch.js';
import { prepareLayers } from './prepare-layers.js';
import type { Scratch } from './scratch.js';
import type { WorkLog } from './work-log.js';

interface RunParts {
  /** Whose stream it is that work is enqueued on. */
  readonly runner: { readonly stream: Stream };
  readonly layers: readonly LayerRunner[];
  readonly scratch: Scratch;
  readonly work: WorkLog;
}

/** Takes the batches of a runner through its layers. */
export class BatchRuns {
  readonly #parts: RunParts;
  readonly #batches = new WeakSet<ModelBatch>();

  constructor(parts: RunParts) {
    this.#parts = parts;
  }

  /** Makes a batch one of the runner's, whose making was enqueued. */
  add(batch: ModelBatch): void {
    this.#batches.add(batch);
    this.#enqueued(batch);
  }

  /** @throws InvalidValueError, DisposedError unless the batch is the runner's, and `layer` its next */
  expectNext(batch: ModelBatch, layer: number): void {
    this.expectOwn(batch);
    const { length } = this.#parts.layers;
    expectWholeNumber('layer', layer, -1, length);
    batch.assertNext(layer, length);
  }

  /** @throws InvalidValueError for a batch of another; DisposedError whose cause is the failure that it was lost by */
  expectOwn(batch: ModelBatch): void {
    if (!this.#batches.has(batch)) {
      throw new InvalidValueError("The batch is not this runner's; make it with its createBatch().", {
        subject: 'batch',
      });
    }
    const cause = this.#parts.work.lostBy(batch);
    if (cause === undefined) return;
    const message = `The batch was ended by an error (${cause.message}); make another with createBatch().`;
    throw new DisposedError(message, { subject: 'batch', cause });
  }

  /** Brings the rows of a batch back that wait in host memory. @throws OutOfMemoryError; nothing is changed then */
  bringBack(batch: ModelBatch): void {
    if (!batch.hiddenRows.isOnHost) return;
    batch.hiddenRows.moveToDevice(this.#parts.runner.stream);
    this.#enqueued(batch);
  }

  /** Moves the rows of a batch to host memory. */
  async moveToHost(batch: ModelBatch, inTurn: (work: () => void) => Promise<void>): Promise<void> {
    this.expectOwn(batch);
    const room = await batch.hiddenRows.hostRoom();
    await inTurn(() => {
      try {
        this.expectOwn(batch);
      } catch (error) {
        room.dispose();
        throw error;
      }
      batch.hiddenRows.moveToHost(this.#parts.runner.stream, room);
      this.#enqueued(batch);
    });
  }

  /**
   * Enqueues chunks, layer by layer up to `end`, as long as all rows of one fit into what `tokenLayers` leave.
   * @returns how many rows went through a layer
   * @throws OutOfMemoryError when the cache has no room for a chunk: those before it stay
   */
  async advance(batch: ModelBatch, end: number, tokenLayers = Infinity): Promise<number> {
    const { layers, work, runner } = this.#parts;
    this.bringBack(batch);
    let done = 0;
    while (batch.nextLayer < end && done + batch.nextRows <= tokenLayers) {
      this.expectOwn(batch);
      batch.assertTurn();
      const { nextLayer: first, nextChunk: chunk, nextRows } = batch;
      // A batch of one chunk finds room in all layers or in none.
      const fitting = Math.min(end - first, Math.floor((tokenLayers - done) / nextRows));
      const count = batch.chunks.length === 1 ? fitting : 1;
      const next = layers.slice(first, first + count);
      const owners = [batch, ...batch.entries.map(({ sequence }) => sequence)];
      await work.during(runner.stream, owners, () => this.#runChunk(batch, chunk, next));
      batch.pass(count);
      done += count * nextRows;
    }
    if (batch.nextLayer === layers.length) for (const entry of batch.entries) leave(entry);
    return done;
  }

  async #runChunk(batch: ModelBatch, chunk: BatchChunk, layers: readonly LayerRunner[]): Promise<void> {
    const { runner, scratch } = this.#parts;
    prepareLayers(runner.stream, layers, chunk.rows);
    for (const { sequence } of batch.entries) sequence.enter(batch);
    try {
      for (const layer of layers) {
        // A policy that plans on the host gives others a turn between layers.
        batch.assertTurn();
        await layer.run(batch, chunk, scratch.forRows(chunk.rows.rows));
        // The others of a batch go on; when none is left, the first failure is that of the batch.
        const failures = batch.entries.map(({ sequence }) => sequence.failure);
        const [failure] = failures;
        if (failure && failures.every((each) => each !== undefined)) throw failure;
      }
    } catch (error) {
      for (const { sequence } of batch.entries) {
        sequence.fail(error);
        sequence.dispose();
      }
      throw error;
    }
  }

  #enqueued(batch: ModelBatch): void {
    const { work, runner } = this.#parts;
    work.enqueued(runner.stream, [batch]);
  }
}
