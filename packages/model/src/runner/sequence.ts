import { DisposedError } from '@kv/sparse-core';

/** One text that a runner works on: a slot of its cache and the tokens that are in it. */
export class Sequence implements Disposable {
  readonly slot: number;
  readonly #release: (sequence: Sequence) => void;
  #length = 0;
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

  /** Counts tokens whose last layer is enqueued. */
  advance(tokens: number): void {
    this.#length += tokens;
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
