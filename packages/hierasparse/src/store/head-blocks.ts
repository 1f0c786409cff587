import { anySparse, type Shares } from '../block-sparsity.js';
import { blockTokens, type KvOperand, operands } from '../mixed-blocks.js';
import type { BlockNeeds, MixedBlockPools } from './mixed-block-pools.js';

/** What becomes sparse of one head, as `compress24` takes it. */
export interface HeadPruning {
  readonly firstBlock: number;
  readonly endBlock: number;
  readonly sparseIds: readonly number[];
  readonly freedFrom: number;
}

/** What holds for all heads of a layer. */
export interface HeadRules {
  readonly pools: MixedBlockPools;
  readonly sinkBlocks: number;
  /** What is sparse of a prompt while it is read, and what is when it is complete. */
  readonly prompt: Shares;
  readonly after: Shares;
}

/** Which blocks are copied onto which: of the dense pool, and of the sparse ones of keys and of values. */
export type CopiesOfPools = Readonly<Record<'dense' | KvOperand, { readonly from: number[]; readonly to: number[] }>>;

type Blocks = Record<KvOperand, number[]>;

/** Blocks of the pools that one kv head of one slot holds: which ones the host knows, though not always of what. */
export class HeadBlocks {
  readonly #rules: HeadRules;
  #finished = false;
  /** Pairs of blocks that no pruning has had in its range, in the order of the sequence. */
  #pairs: number[] = [];
  /** How many blocks, behind the sinks, prunings have had in their range; what of them is where, the device knows. */
  #candidates = 0;
  /** Places in the dense pool, and sparse blocks, of the candidates. */
  #dense: Blocks = { keys: [], values: [] };
  #sparse: Blocks = { keys: [], values: [] };

  constructor(rules: HeadRules) {
    this.#rules = rules;
  }

  get count(): number {
    return this.#pairs.length + this.#candidates;
  }

  /** Whether a block may be sparse. */
  get pruned(): boolean {
    return this.#candidates > 0;
  }

  /** The end of the range that prunings have had. */
  get endBlock(): number {
    return this.#rules.sinkBlocks + this.#candidates;
  }

  /** What of the range is to be sparse before a step. */
  get shares(): Shares {
    return this.#finished ? this.#rules.after : this.#rules.prompt;
  }

  /** Whether a block needs a single when it leaves its pair, of which this share becomes sparse. */
  needsSingle(share: number): boolean {
    return anySparse(this.#rules.prompt) && share < 1;
  }

  /** What the head may come to need, beside pairs, with so many blocks more, or less. */
  needs(more: number): BlockNeeds {
    const [now, then] = [this.#mayNeed(this.count), this.#mayNeed(this.count + more)];
    return {
      keys: then.keys - now.keys,
      values: then.values - now.values,
      singles: then.singles - now.singles,
    };
  }

  add(pairs: readonly number[]): void {
    this.#rules.pools.promise(this.needs(pairs.length));
    this.#pairs.push(...pairs);
  }

  /** Where the blocks end that may be sparse, in tokens. */
  get sparseEnd(): number {
    return this.pruned ? this.endBlock * blockTokens : 0;
  }

  /** Returns the blocks from `count` on, none of which may be sparse. */
  truncate(count: number): void {
    const { pools } = this.#rules;
    pools.promise(this.needs(Math.min(0, count - this.count)));
    pools.pairIds.free(this.#pairs.splice(count - this.#candidates));
  }

  /** The prompt is complete. */
  finish(): void {
    this.#finished = true;
  }

  /** Whether the range reaches `endBlock` and is as sparse as it is to be. */
  settled(endBlock: number, shares: Shares): boolean {
    if (!anySparse(shares)) return true;
    return endBlock <= this.endBlock && operands.every((operand) => this.#missing(operand, shares[operand]) <= 0);
  }

  /** Puts the blocks below `endBlock`, but for the sinks, in the range of prunings; returns the pairs of the new ones. */
  extendRange(endBlock: number): readonly number[] {
    const pairs = this.#pairs.splice(this.#rules.sinkBlocks, Math.max(0, endBlock - this.endBlock));
    this.#candidates += pairs.length;
    return pairs;
  }

  /** Where the blocks are in the dense pool that the range was extended by. */
  place(operand: KvOperand, places: readonly number[]): void {
    this.#dense[operand].push(...places);
  }

  /** Brings the sparse part of the range up to `share`; undefined when it is that already. */
  prune(operand: KvOperand, share: number): HeadPruning | undefined {
    const { pools, sinkBlocks } = this.#rules;
    const sparse = this.#sparse[operand];
    const count = this.#missing(operand, share);
    if (count <= 0) return undefined;
    const dense = this.#dense[operand].sort((a, b) => a - b);
    const sparseIds = pools.sparse[operand].ids.allocate(count);
    const freed = dense.splice(dense.length - count);
    sparse.push(...sparseIds);
    pools.freeDense(freed);
    return { firstBlock: sinkBlocks, endBlock: this.endBlock, sparseIds, freedFrom: freed[0] ?? 0 };
  }

  /** The range is dense again, in these pairs. */
  makeDense(pairs: readonly number[]): void {
    this.#freeCandidates();
    this.#pairs.splice(this.#rules.sinkBlocks, 0, ...pairs);
    this.#candidates = 0;
  }

  /** How many pairs a copy of the first `count` blocks takes. */
  pairsToCopy(count: number): number {
    return count - this.#candidates + this.#pairsOfCandidates().length;
  }

  /** Makes an empty head hold the first `count` blocks of another, in blocks of its own; which, `copies` then says. */
  copy(from: HeadBlocks, count: number, pairs: readonly number[], copies: CopiesOfPools): void {
    const { pools } = this.#rules;
    pools.promise(this.needs(count));
    const kept = count - from.#candidates;
    const renamed = new Map(from.#pairsOfCandidates().map((pair, index) => [pair, pairs[kept + index] ?? 0]));
    this.#pairs = pairs.slice(0, kept);
    this.#candidates = from.#candidates;
    this.#finished = from.#finished;
    for (const operand of operands) {
      const placesOf = (some: readonly number[]) => pools.placesOf(operand, some);
      const [dense, sparse] = [from.#dense[operand], from.#sparse[operand]];
      this.#dense[operand] = dense.flatMap((place) => {
        const pair = renamed.get(pools.pairAt(place) ?? -1);
        return pair === undefined ? pools.allocateSingles(1) : placesOf([pair]);
      });
      this.#sparse[operand] = pools.sparse[operand].ids.allocate(sparse.length);
      copies.dense.from.push(...placesOf(from.#pairs.slice(0, kept)), ...dense);
      copies.dense.to.push(...placesOf(this.#pairs), ...this.#dense[operand]);
      copies[operand].from.push(...sparse);
      copies[operand].to.push(...this.#sparse[operand]);
      // Of a pair of which the other half alone is copied.
      const held = new Set(this.#dense[operand]);
      pools.freeDense(placesOf([...renamed.values()]).filter((place) => !held.has(place)));
    }
  }

  /** Bytes of the blocks, and of the two entries of the index maps for each (equations 5a to 5d). */
  bytes(): number {
    const { denseBytes, sparseBytes } = this.#rules.pools;
    const both = (blocks: Blocks) => blocks.keys.length + blocks.values.length;
    const dense = 2 * this.#pairs.length + both(this.#dense);
    return (
      dense * denseBytes + both(this.#sparse) * sparseBytes + 2 * this.count * Int32Array.BYTES_PER_ELEMENT
    );
  }

  release(): void {
    const { pools } = this.#rules;
    pools.promise(this.needs(-this.count));
    pools.pairIds.free(this.#pairs);
    this.#freeCandidates();
    this.#finished = false;
    this.#pairs = [];
    this.#candidates = 0;
  }

  #freeCandidates(): void {
    const { pools } = this.#rules;
    for (const operand of operands) {
      pools.freeDense(this.#dense[operand]);
      pools.sparse[operand].ids.free(this.#sparse[operand]);
    }
    this.#dense = { keys: [], values: [] };
    this.#sparse = { keys: [], values: [] };
  }

  /** How many sparse blocks the range lacks. */
  #missing(operand: KvOperand, share: number): number {
    return Math.round(share * this.#candidates) - this.#sparse[operand].length;
  }

  /** The pairs of which candidates hold a half, or both. */
  #pairsOfCandidates(): number[] {
    const { pools } = this.#rules;
    const pairs = operands.flatMap((operand) => this.#dense[operand].map((place) => pools.pairAt(place)));
    return [...new Set(pairs.filter((pair) => pair !== undefined))];
  }

  #mayNeed(count: number): BlockNeeds {
    const { sinkBlocks, prompt, after } = this.#rules;
    const most = Math.max(0, count - sinkBlocks);
    const ofShare = (share: number) => Math.round(share * most);
    const singles = anySparse(prompt) ? 2 * most - ofShare(prompt.keys) - ofShare(prompt.values) : 0;
    return { keys: ofShare(after.keys), values: ofShare(after.values), singles };
  }
}
