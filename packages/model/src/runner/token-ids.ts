/** What stands for a token that the device chose, until the host is told which one it is. */
export const unknownId = -1;

/** The tokens of a sequence, 4 bytes each, in memory that grows with them. */
export class TokenIds {
  #held: Int32Array;
  #length: number;

  constructor(ids: Int32Array) {
    this.#held = ids;
    this.#length = ids.length;
  }

  get length(): number {
    return this.#length;
  }

  /** Adds so many tokens; which ones they are, `set` says. */
  grow(count: number): void {
    const start = this.#length;
    this.#length += count;
    if (this.#length > this.#held.length) {
      const larger = new Int32Array(Math.max(this.#length, 2 * this.#held.length));
      larger.set(this.#held.subarray(0, start));
      this.#held = larger;
    }
    this.#held.fill(unknownId, start, this.#length);
  }

  set(position: number, ids: ArrayLike<number>): void {
    this.#held.set(ids, position);
  }

  truncate(length: number): void {
    this.#length = length;
  }

  copy(): Int32Array {
    return this.#held.slice(0, this.#length);
  }
}
