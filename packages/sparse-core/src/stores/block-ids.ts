import { OutOfMemoryError } from '../errors.js';

/** A block that one of its holders is about to write to. */
export interface WrittenBlock {
  readonly id: number;
  /** How often that one holds it. Default: once. */
  readonly holds?: number | undefined;
}

/**
 * Hands out the numbers of a pool's blocks, and counts who holds each: sequences of the same text share its blocks. A
 * block that its last holder frees may be handed out at once: its readers and its next writer are on the same stream.
 */
export class BlockIds {
  /** Blocks that nobody holds, but that may come to be needed: what is admitted can become what it is to become. */
  promised = 0;
  readonly count: number;
  readonly #subject: string;
  readonly #spare: number;
  readonly #free: number[] = [];
  readonly #holders: Int32Array;
  /** The first block that was never handed out. */
  #next = 0;
  #shared = 0;

  /** @param spare blocks that are never promised, for what is held twice while it moves */
  constructor(subject: string, count: number, spare = 0) {
    this.#subject = subject;
    this.count = count;
    this.#spare = spare;
    this.#holders = new Int32Array(count);
  }

  /** Blocks that several hold. */
  get shared(): number {
    return this.#shared;
  }

  /** Blocks that nobody holds. */
  get available(): number {
    return this.#free.length + this.count - this.#next;
  }

  /**
   * Blocks that had no holder, with one each, in ascending order: what follows each other is copied in one piece.
   * @throws OutOfMemoryError when fewer are available; none is taken then
   */
  allocate(count: number): Int32Array {
    this.expectAvailable(count);
    const ids = new Int32Array(count);
    for (let index = 0; index < count; index++) {
      const id = this.#free.pop() ?? this.#next++;
      this.#holders[id] = 1;
      ids[index] = id;
    }
    return ids.sort();
  }

  /** A holder more for each. */
  share(ids: Int32Array): void {
    // A fork of a long text comes here with a quarter of a million: iterators, or a call for each, take several times as long.
    const holders = this.#holders;
    const { length } = ids;
    let shared = 0;
    for (let index = 0; index < length; index++) {
      const id = ids[index] ?? NaN;
      const count = (holders[id] ?? 0) + 1;
      holders[id] = count;
      if (count === 2) shared += 1;
    }
    this.#shared += shared;
  }

  shareOne(id: number): void {
    const holders = this.holders(id) + 1;
    this.#holders[id] = holders;
    if (holders === 2) this.#shared += 1;
  }

  /** How many hold a block. One that several hold must not be written to. */
  holders(id: number): number {
    return this.#holders[id] ?? 0;
  }

  /** Those of the blocks that nobody holds. A loop: a long text has a hundred thousand, and callbacks would take milliseconds. */
  unheld(ids: Int32Array): Int32Array {
    const { length } = ids;
    const found = new Int32Array(length);
    let count = 0;
    for (let index = 0; index < length; index++) {
      const id = ids[index] ?? NaN;
      if (this.#holders[id] === 0) found[count++] = id;
    }
    return found.subarray(0, count);
  }

  /**
   * Of blocks that are about to be written to, those that others hold too and that the writer must replace: of blocks
   * that are given by all of their holders, all but the last.
   */
  toReplace<Written extends WrittenBlock>(written: readonly Written[]): Written[] {
    if (written.length === 0) return [];
    const left = new Map<number, number>();
    return written.filter(({ id, holds = 1 }) => {
      const holders = left.get(id) ?? this.holders(id);
      if (holders <= holds) return false;
      left.set(id, holders - holds);
      return true;
    });
  }

  /** A holder less for each. */
  free(ids: Int32Array): void {
    const holders = this.#holders;
    const { length } = ids;
    let shared = 0;
    for (let index = 0; index < length; index++) {
      const id = ids[index] ?? NaN;
      const left = (holders[id] ?? 0) - 1;
      holders[id] = left;
      if (left === 1) shared -= 1;
      if (left === 0) this.#free.push(id);
    }
    this.#shared += shared;
  }

  freeOne(id: number): void {
    const left = this.holders(id) - 1;
    this.#holders[id] = left;
    if (left === 1) this.#shared -= 1;
    if (left === 0) this.#free.push(id);
  }

  /** @throws OutOfMemoryError unless `count` blocks are there that nobody holds */
  expectAvailable(count: number): void {
    this.#expect(count, this.available);
  }

  /** @throws OutOfMemoryError unless `count` blocks are there that nobody holds or was promised */
  expectUnpromised(count: number): void {
    this.#expect(count, this.available - this.#spare - this.promised);
  }

  #expect(needed: number, available: number): void {
    if (needed <= available) return;
    throw new OutOfMemoryError(
      `The key/value cache has ${available} of ${this.count} ${this.#subject} left and ${needed} are needed. ` +
        'Give the cache more tokens (cacheTokens of a runner), or release sequences.',
      { subject: this.#subject, given: needed, wanted: available },
    );
  }
}
