import { workingSetSteps } from '../operations/plan-blocks.js';

/** What a kv head of a slot reads in a step. */
export interface ReadList {
  /** Of the slot and kv head, in tables. */
  readonly head: number;
  /** Numbers within the sequence, ascending. */
  readonly chosen: readonly number[];
  /** Tokens of the sequence. */
  readonly tokens: number;
  readonly hostBlocks: Int32Array;
}

export interface PlanSizes {
  readonly heads: number;
  readonly blockTokens: number;
  readonly sinkBlocks: number;
  readonly recentBlocks: number;
  readonly cached: number;
}

/** A cache by the definition: of each host block that is on the device its place, and the step that last chose it. */
export class PlanOracle {
  readonly #sizes: PlanSizes;
  readonly #places = new Map<number, { readonly place: number; usedAt: number }>();
  readonly #sets = new Map<number, { lists: number[][]; steps: number; hits: number; misses: number }>();
  #step = 0;

  constructor(sizes: PlanSizes) {
    this.#sizes = sizes;
  }

  forget(hostBlock: number): void {
    this.#places.delete(hostBlock);
  }

  /** A place of the cache that holds nothing gets this block, as `placeBlocks` gives it. Returns its number there, if there is any. */
  place(hostBlock: number): number | undefined {
    const { heads, sinkBlocks, recentBlocks, cached } = this.#sizes;
    if (this.#places.has(hostBlock)) return undefined;
    const first = heads * (sinkBlocks + recentBlocks);
    const taken = new Set(Array.from(this.#places.values(), ({ place }) => place - first));
    const free = Array.from({ length: cached }, (_, index) => index).find((index) => !taken.has(index));
    if (free !== undefined) this.#places.set(hostBlock, { place: first + free, usedAt: 0 });
    return free;
  }

  plan(lists: readonly ReadList[]) {
    const { heads, blockTokens, sinkBlocks, recentBlocks, cached } = this.#sizes;
    const now = ++this.#step;
    const fixed = sinkBlocks + recentBlocks;
    const isCached = (block: number, blocks: number) => block >= sinkBlocks && block < blocks - recentBlocks;
    const blocksOf = ({ tokens }: ReadList) => Math.ceil(tokens / blockTokens);
    const read = lists.map((list) => list.chosen.filter((block) => isCached(block, blocksOf(list))));
    const hostBlocks = read.map((blocks, index) => blocks.map((block) => lists[index]?.hostBlocks[block] ?? NaN));
    const lacking = [...new Set(hostBlocks.flat())].filter((block) => !this.#places.has(block));
    lists.forEach((list, index) => {
      const set = this.#sets.get(list.head) ?? { lists: [], steps: 0, hits: 0, misses: 0 };
      set.lists = [...set.lists, read[index] ?? []].slice(-workingSetSteps);
      set.steps += 1;
      set.misses += hostBlocks[index]?.filter((block) => lacking.includes(block)).length ?? NaN;
      set.hits += hostBlocks[index]?.filter((block) => !lacking.includes(block)).length ?? NaN;
      this.#sets.set(list.head, set);
    });
    for (const block of hostBlocks.flat()) {
      const held = this.#places.get(block);
      if (held) held.usedAt = now;
    }
    const holders = new Map([...this.#places].map(([block, { place, usedAt }]) => [place, { block, usedAt }]));
    const oldest = Array.from({ length: cached }, (_, index) => heads * fixed + index)
      .filter((place) => holders.get(place)?.usedAt !== now)
      .sort((one, other) => (holders.get(one)?.usedAt ?? 0) - (holders.get(other)?.usedAt ?? 0) || one - other)
      .slice(0, lacking.length)
      .sort((one, other) => one - other);
    const loads = lacking.map((block, index) => {
      const place = oldest[index] ?? NaN;
      const former = holders.get(place);
      if (former) this.#places.delete(former.block);
      this.#places.set(block, { place, usedAt: now });
      return [block, place] as const;
    });
    const tables = lists.map((list) => ({
      ...list,
      places: list.chosen.map((block) =>
        isCached(block, blocksOf(list))
          ? (this.#places.get(list.hostBlocks[block] ?? NaN)?.place ?? NaN)
          : list.head * fixed + (block < sinkBlocks ? block : sinkBlocks + (block % recentBlocks)),
      ),
      tokens: list.chosen.length * blockTokens - (blocksOf(list) * blockTokens - list.tokens),
    }));
    return { loads, tables };
  }

  /** Steps, working set, hits, misses. */
  demand(head: number): number[] {
    const set = this.#sets.get(head);
    return set ? [set.steps, new Set(set.lists.flat()).size, set.hits, set.misses] : [0, 0, 0, 0];
  }
}
