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
    expectAvailable(this.#subject, count, available, this.#count);
    return Array.from({ length: count }, () => this.#free.pop() ?? this.#untouched++);
  }

  free(ids: Iterable<number>): void {
    this.#free.push(...ids);
  }
}

/** @throws OutOfMemoryError when more blocks are needed than are available of all that there are */
export function expectAvailable(subject: string, needed: number, available: number, all: number): void {
  if (needed <= available) return;
  throw new OutOfMemoryError(
    `The key/value cache has ${available} of ${all} ${subject} left and ${needed} are needed. ` +
      'Open the model with a larger contextTokens, or release sequences.',
    { subject, given: needed, wanted: available },
  );
}
