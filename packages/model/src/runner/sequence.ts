import { DisposedError, InvalidValueError } from '@kv/sparse-core';

/** One text that a runner works on: a slot of its cache and the tokens that are in it. */
export class Sequence implements Disposable {
  readonly slot: number;
  readonly #release: (sequence: Sequence) => void;
  #length = 0;
  /** The batch whose layers the sequence is going through. */
  #batch: object | undefined;
  #disposed = false;

  /** @param release returns the slot and its memory */
  constructor(slot: number, release: (sequence: Sequence) => void) {
    this.slot = slot;
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
