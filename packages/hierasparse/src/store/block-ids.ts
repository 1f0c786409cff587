import { OutOfMemoryError } from '@kv/sparse-core';

/** Hands out the numbers of a pool's blocks, and counts those that are promised. */
export class BlockIds {
  /** Blocks that heads have or may come to need, so that what is admitted can become what it is to become. */
  promised = 0;
  readonly #subject: string;
  readonly #count: number;
  readonly #spare: number;
  readonly #free: number[] = [];
  #untouched = 0;

  /** @param spare blocks that are never promised, for what is held twice while it moves */
  constructor(subject: string, count: number, spare = 0) {
    this.#subject = subject;
    this.#count = count;
    this.#spare = spare;
  }

  /** @throws OutOfMemoryError when fewer are available; none is taken then */
  allocate(count: number): number[] {
    this.#expect(count, this.#free.length + this.#count - this.#untouched);
    return Array.from({ length: count }, () => this.#free.pop() ?? this.#untouched++);
  }

  free(ids: Iterable<number>): void {
    for (const id of ids) this.#free.push(id);
  }

  /** @throws OutOfMemoryError unless `count` blocks are there that nobody was promised */
  expectUnpromised(count: number): void {
    this.#expect(count, this.#count - this.#spare - this.promised);
  }

  #expect(needed: number, available: number): void {
    if (needed <= available) return;
    throw new OutOfMemoryError(
      `The key/value cache has ${available} of ${this.#count} ${this.#subject} left and ${needed} are needed. ` +
        'Give the cache more tokens (cacheTokens of a runner), or release sequences.',
      { subject: this.#subject, given: needed, wanted: available },
    );
  }
}
