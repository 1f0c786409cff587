import type { BlockCounts } from './block-counts.js';
import type { Reader } from './reader.js';

/** How much of the newest ratio the mean takes over. */
const share = 0.1;

/** Estimates how many blocks of one layer a request's next step finds useful (section 3.3 of the paper). */
export class WorkingSets {
  readonly #counts: BlockCounts;
  /** Blocks of a working set to those that one step reads, the mean over requests. */
  #ratio = 1;

  constructor(counts: BlockCounts) {
    this.#counts = counts;
  }

  observe(reader: Reader, workingSet: number): void {
    reader.workingSet = workingSet;
    const read = this.#read(reader);
    if (read > 0) this.#ratio += share * (Math.max(1, workingSet / read) - this.#ratio);
  }

  /** What its last steps read; of a request without any, as much as others did. */
  estimate(reader: Reader): number {
    const read = this.#read(reader);
    const { workingSet = Math.ceil(read * this.#ratio) } = reader;
    return Math.min(Math.max(workingSet, read), this.#counts.read(reader.length + 1));
  }

  #read({ length, budgetTokens }: Reader): number {
    return this.#counts.read(length + 1, budgetTokens);
  }
}
