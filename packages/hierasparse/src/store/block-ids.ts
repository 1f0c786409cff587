import { OutOfMemoryError } from '@kv/sparse-core';

/** Hands out the numbers of a pool's blocks. */
export class BlockIds {
  readonly #subject: string;
  readonly #count: number;
  readonly #free: number[] = [];
  #untouched = 0;

  constructor(subject: string, count: number) {
    this.#subject = subject;
    this.#count = count;
  }

  /** @throws OutOfMemoryError when fewer are available; none is taken then */
  allocate(count: number): number[] {
    const available = this.#free.length + this.#count - this.#untouched;
    if (count > available) {
      throw new OutOfMemoryError(
        `The key/value cache has ${available} of ${this.#count} ${this.#subject} left and ${count} are needed. ` +
          'Open the model with a larger contextTokens, or release sequences.',
        { subject: this.#subject, given: count, wanted: available },
      );
    }
    return Array.from({ length: count }, () => this.#free.pop() ?? this.#untouched++);
  }

  free(ids: Iterable<number>): void {
    this.#free.push(...ids);
  }
}
