import { DisposedError, InvalidValueError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';

export interface SequenceParts {
  readonly slot: number;
  /** Chooses what the cache keeps when a prompt ends; undefined keeps everything. */
  readonly select: KvSelector | undefined;
  /** Tokens that the slot holds already. */
  readonly length: number;
  /** Returns the slot and its memory. */
  readonly release: (sequence: Sequence) => void;
}

/** One text that a runner works on: a slot of its cache and the tokens that are in it. */
export class Sequence implements Disposable {
  readonly slot: number;
  readonly select: KvSelector | undefined;
  readonly #release: (sequence: Sequence) => void;
  #length: number;
  /** The batch whose layers the sequence is going through. */
  #batch: object | undefined;
  #disposed = false;

  constructor({ slot, select, length, release }: SequenceParts) {
    this.slot = slot;
    this.select = select;
    this.#length = length;
    this.#release = release;
  }

  /** Tokens that the model has seen, which is the position of the next one. */
  get length(): number {
    return this.#length;
  }

  get disposed(): boolean {
    return this.#disposed;
  }

  /**
   * Whether a batch may run layers on this sequence.
   * @param position where the batch's first token of this sequence stands
   * @throws InvalidValueError when another batch is on its way, or has passed since this one was made
   */
  assertTurn(batch: object, position: number): void {
    this.assertUsable();
    const other = this.#batch !== undefined && this.#batch !== batch;
    if (other || position !== this.#length) {
      throw new InvalidValueError(
        `The batch begins at position ${position} of a sequence of ${this.#length} tokens` +
          `${other ? ', and another batch is between its layers' : ''}. Run one batch of a sequence to its ` +
          'last layer before the next is made; dispose a sequence whose batch was given up.',
        { subject: 'batch', given: position, wanted: this.#length },
      );
    }
  }

  /** @throws InvalidValueError when a batch is between its layers */
  assertWhole(): void {
    this.assertUsable();
    if (this.#batch === undefined) return;
    throw new InvalidValueError(
      'The sequence has a batch between its layers, some of which hold more tokens than others. Run it to its last.',
      { subject: 'sequence', given: 'between layers', wanted: 'after the last layer' },
    );
  }

  /** From here on the sequence is that batch's, until `leave`. */
  enter(batch: object): void {
    this.#batch = batch;
  }

  /** Counts the tokens of the batch whose last layer is enqueued. */
  leave(tokens: number): void {
    this.#length += tokens;
    this.#batch = undefined;
  }

  /** @throws DisposedError */
  assertUsable(): void {
    if (this.#disposed) {
      throw new DisposedError('The sequence was disposed; open another with runner.openSequence().', {
        subject: 'sequence',
      });
    }
  }

  /** Returns the cache's memory once the work that is already enqueued is done. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#release(this);
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
