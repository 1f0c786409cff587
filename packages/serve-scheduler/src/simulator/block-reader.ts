import { Random } from './random.js';

/** Steps whose blocks are a working set. */
const windowSteps = 12;
/** What an answer reads in steps that follow each other. */
export interface Locality {
  /** How often a block that was read is replaced in the next step. */
  readonly replaced: number;
  /** How often by one that was read not long ago. */
  readonly returning: number;
  /** How many steps ago that was, on average. */
  readonly awaySteps: number;
  /** How much more often some of the others are read than the rest: the exponent of a Zipf distribution, 0 for none. */
  readonly exponent: number;
}

/**
 * So chosen that overlaps rise from 1 to 12 steps as the paper's do (Fig. 8), and that 8 answers wait for their blocks as long
 * as the paper's (Fig. 14a).
 */
const ofPaper: Locality = { replaced: 0.125, returning: 0.85, awaySteps: 3, exponent: 1 };
const isRead = 2 ** 31 - 1;

/**
 * Blocks that a kv head reads step by step, as far as it can be generated: most of those of the step before, some that were
 * read not long ago, and others of which a few are read far more often than the rest (Zipf).
 */
export class BlockReader {
  readonly #random: Random;
  readonly #locality: Locality;
  readonly #blocks: number[] = [];
  /** The step that last read a block, `isRead` while it is among the blocks, 0 before it ever was. */
  readonly #lastRead: Int32Array;
  /** Blocks that were replaced, and the step that last read each. The oldest first. */
  #away: { readonly block: number; readonly step: number }[] = [];
  /** Where the hot blocks are. */
  readonly #shift: number;
  #step = windowSteps;
  /** Blocks that the last 12 steps read, each counted once. */
  workingSet = 0;

  /** @param most blocks that there will ever be */
  constructor(random: Random, most: number, locality = ofPaper) {
    this.#random = random;
    this.#locality = locality;
    this.#lastRead = new Int32Array(most);
    this.#shift = random.below(2 ** 20);
  }

  /** What the next step reads: so many of the first `count` blocks, or all of them. */
  next(count: number, budget: number): readonly number[] {
    this.#step += 1;
    const expired = this.#away.findIndex(({ step }) => step > this.#step - windowSteps);
    for (const { block, step } of this.#away.splice(0, expired < 0 ? this.#away.length : expired)) {
      if (this.#lastRead[block] === step) this.workingSet -= 1;
    }
    const wanted = Math.min(count, budget);
    const { replaced } = this.#locality;
    while (this.#blocks.length > wanted) this.#leave(this.#blocks.pop() ?? 0);
    if (wanted < count) {
      // The distance to the next block that is replaced is geometric.
      const distance = (): number => 1 + Math.floor(Math.log(1 - this.#random.next()) / Math.log(1 - replaced));
      for (let index = distance() - 1; index < this.#blocks.length; index += distance()) {
        this.#leave(this.#blocks[index] ?? 0);
        this.#blocks[index] = this.#enter(this.#another(count));
      }
    }
    while (this.#blocks.length < wanted) this.#blocks.push(this.#enter(wanted === count ? this.#unread(0, count) : this.#another(count)));
    return this.#blocks;
  }

  #enter(block: number): number {
    if ((this.#lastRead[block] ?? 0) <= this.#step - windowSteps) this.workingSet += 1;
    this.#lastRead[block] = isRead;
    return block;
  }

  #leave(block: number): void {
    this.#lastRead[block] = this.#step - 1;
    this.#away.push({ block, step: this.#step - 1 });
  }

  #another(count: number): number {
    const { replaced, returning, awaySteps, exponent } = this.#locality;
    if (this.#random.next() < returning) {
      const back = Math.floor(this.#random.exponential() * awaySteps * Math.max(1, this.#blocks.length * replaced));
      for (let index = this.#away.length - 1 - back; index >= 0; index--) {
        const { block, step } = this.#away[index] ?? { block: 0, step: 0 };
        if (this.#lastRead[block] === step && step !== this.#step - 1) return block;
      }
    }
    const rank = Math.min(count, Math.floor(zipf(this.#random.next(), count, exponent))) - 1;
    return this.#unread((rank * 7919 + this.#shift) % count, count);
  }

  /** The first block from there on that is not read now. */
  #unread(start: number, count: number): number {
    let block = start;
    while (this.#lastRead[block] === isRead) block = (block + 1) % count;
    return block;
  }
}

/** The rank, from 1 on, below which a share of a continuous Zipf distribution over so many lies. */
function zipf(share: number, count: number, exponent: number): number {
  if (exponent === 1) return (count + 1) ** share;
  const rest = 1 - exponent;
  return (1 + share * ((count + 1) ** rest - 1)) ** (1 / rest);
}

/** Fig. 8: of so many steps before, the share of the blocks of a step that one of them read, where the budget is 58 of the blocks. */
export function overlapByWindow(blocks: number, seed: number): [steps: number, share: number][] {
  const [budget, steps, windows] = [58, 400, [1, 2, 4, 8, 12, 16]];
  const reader = new BlockReader(new Random(seed), blocks);
  const read = Array.from({ length: steps }, () => new Set(reader.next(blocks, budget)));
  const first = 2 * Math.max(...windows);
  return windows.map((window) => {
    let found = 0;
    for (let step = first; step < steps; step++) {
      const before = new Set(read.slice(step - window, step).flatMap((each) => [...each]));
      for (const block of read[step] ?? []) if (before.has(block)) found += 1;
    }
    return [window, found / ((steps - first) * budget)];
  });
}
