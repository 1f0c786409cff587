import { anySparse, type Shares } from '../block-sparsity.js';
import { blockTokens, type KvOperand, operands } from '../blocks-24.js';
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

/** A pair of dense blocks, of which a head may hold one only, or a single one. */
export interface HeldBlocks {
  readonly kind: 'pair' | 'single';
  /** Of the pool of their kind. */
  readonly id: number;
  /** Where in the dense pool those are that the head holds. */
  readonly places: readonly number[];
  /** How many that are. */
  readonly holds: number;
}

const nothing: BlockNeeds = { keys: 0, values: 0, singles: 0 };

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
  /** What the head may come to need beyond what it holds. */
  #promised = nothing;

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
    return difference(this.#mayNeed(this.count + more), this.#mayNeed(this.count));
  }

  /** What a head may come to need, beside pairs, that shares the first `count` blocks of this one. */
  needsOfCopy(count: number): BlockNeeds {
    return difference(this.#mayNeed(count), this.#held);
  }

  add(pairs: readonly number[]): void {
    this.#pairs.push(...pairs);
    this.#settle();
  }

  /** Pairs of the first `count` blocks, where none may be sparse. */
  pairsBelow(count: number): HeldBlocks[] {
    return this.#pairs.slice(0, count).map((pair) => this.#wholePair(pair));
  }

  /** The pair of a block that is not in the range of prunings; undefined when there is none yet. */
  pairOf(block: number): HeldBlocks | undefined {
    const pair = this.#pairAt(block);
    return pair === undefined ? undefined : this.#wholePair(pair);
  }

  /** The same, when others hold it too. */
  sharedPairOf(block: number): HeldBlocks | undefined {
    const pair = this.#pairAt(block);
    return pair === undefined || this.#rules.pools.pairIds.holders(pair) <= 2 ? undefined : this.#wholePair(pair);
  }

  /** Places of dense blocks, in no order. */
  get places(): number[] {
    return operands.flatMap((operand) => [
      ...this.#rules.pools.placesOf(operand, this.#pairs),
      ...this.#dense[operand],
    ]);
  }

  sparseIds(operand: KvOperand): readonly number[] {
    return this.#sparse[operand];
  }

  /** Where the blocks end that may be sparse, in tokens. */
  get sparseEnd(): number {
    return this.pruned ? this.endBlock * blockTokens : 0;
  }

  /** Returns the blocks from `count` on, none of which may be sparse. */
  truncate(count: number): void {
    this.#rules.pools.freePairs(this.#pairs.splice(count - this.#candidates));
    this.#settle();
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
    this.#settle();
  }

  /**
   * The blocks that prunings up to `endBlock` may write to: where some of the dense ones of the range become sparse, and
   * not all, others move into their places.
   */
  movedBy(endBlock: number, targets: readonly Shares[]): HeldBlocks[] {
    if (targets.every((shares) => this.settled(endBlock, shares))) return [];
    const { pools, sinkBlocks } = this.#rules;
    const more = Math.max(0, endBlock - this.endBlock);
    const added = this.#pairs.slice(sinkBlocks, sinkBlocks + more);
    const moved = targets.flatMap((shares) =>
      operands.flatMap((operand) => {
        const [share, held] = [shares[operand], this.#dense[operand]];
        const count = Math.round(share * (this.#candidates + more)) - this.#sparse[operand].length;
        if (count <= 0 || count >= held.length + more) return [];
        return this.needsSingle(share) ? held : [...held, ...pools.placesOf(operand, added)];
      }),
    );
    return moved.length === 0 ? [] : this.#heldAt(new Set(moved), added);
  }

  /** Others have taken the places of dense blocks; a pair has the number of the place of its keys. */
  replace(places: ReadonlyMap<number, number>): void {
    const other = (place: number) => places.get(place) ?? place;
    this.#pairs = this.#pairs.map(other);
    for (const operand of operands) this.#dense[operand] = this.#dense[operand].map(other);
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
    this.#settle();
    return { firstBlock: sinkBlocks, endBlock: this.endBlock, sparseIds, freedFrom: freed[0] ?? 0 };
  }

  /** The range is dense again, in these pairs. */
  makeDense(pairs: readonly number[]): void {
    this.#freeCandidates();
    this.#pairs.splice(this.#rules.sinkBlocks, 0, ...pairs);
    this.#candidates = 0;
    this.#settle();
  }

  /** Makes an empty head share the first `count` blocks of another, but for the last one if `last` takes its place. */
  copy(from: HeadBlocks, count: number, last: number | undefined): void {
    const { pools } = this.#rules;
    this.#pairs = from.#pairs.slice(0, count - from.#candidates);
    if (last !== undefined) this.#pairs.pop();
    for (const operand of operands) {
      this.#dense[operand] = [...from.#dense[operand]];
      this.#sparse[operand] = [...from.#sparse[operand]];
      pools.shareDense(this.#dense[operand]);
      pools.sparse[operand].ids.share(this.#sparse[operand]);
    }
    pools.sharePairs(this.#pairs);
    if (last !== undefined) this.#pairs.push(last);
    this.#candidates = from.#candidates;
    this.#finished = from.#finished;
    this.#settle();
  }

  release(): void {
    this.#rules.pools.freePairs(this.#pairs);
    this.#freeCandidates();
    this.#finished = false;
    this.#pairs = [];
    this.#candidates = 0;
    this.#settle();
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

  #pairAt(block: number): number | undefined {
    return this.#pairs[block < this.#rules.sinkBlocks ? block : block - this.#candidates];
  }

  #wholePair(pair: number): HeldBlocks {
    const places = operands.flatMap((operand) => this.#rules.pools.placesOf(operand, [pair]));
    return { kind: 'pair', id: pair, places, holds: places.length };
  }

  /** What is at these places of candidates, and of pairs that are to be candidates. */
  #heldAt(places: ReadonlySet<number>, added: readonly number[]): HeldBlocks[] {
    const { pools } = this.#rules;
    const whole = new Set(added);
    const candidates = new Set([...this.#dense.keys, ...this.#dense.values]);
    const pairs = new Set([...places].map((place) => pools.pairAt(place)).filter((pair) => pair !== undefined));
    const ofPair = (pair: number): HeldBlocks => {
      const both = this.#wholePair(pair);
      const held = whole.has(pair) ? both.places : both.places.filter((place) => candidates.has(place));
      return { ...both, places: held, holds: held.length };
    };
    const singles = [...places].filter((place) => pools.pairAt(place) === undefined);
    return [
      ...[...pairs].map(ofPair),
      ...singles.map((place) => ({ kind: 'single' as const, id: pools.idAt(place), places: [place], holds: 1 })),
    ];
  }

  /** Blocks that are held, beside pairs. */
  get #held(): BlockNeeds {
    const { keys, values } = this.#dense;
    return {
      keys: this.#sparse.keys.length,
      values: this.#sparse.values.length,
      singles: this.#rules.pools.countSingles(keys) + this.#rules.pools.countSingles(values),
    };
  }

  /** Promises what is not held of what may come to be needed. */
  #settle(): void {
    const promised = difference(this.#mayNeed(this.count), this.#held);
    this.#rules.pools.promise(difference(promised, this.#promised));
    this.#promised = promised;
  }

  #mayNeed(count: number): BlockNeeds {
    const { sinkBlocks, prompt, after } = this.#rules;
    const most = Math.max(0, count - sinkBlocks);
    const ofShare = (share: number) => Math.round(share * most);
    const singles = anySparse(prompt) ? 2 * most - ofShare(prompt.keys) - ofShare(prompt.values) : 0;
    return { keys: ofShare(after.keys), values: ofShare(after.values), singles };
  }
}

function difference(whole: BlockNeeds, part: BlockNeeds): BlockNeeds {
  return { keys: whole.keys - part.keys, values: whole.values - part.values, singles: whole.singles - part.singles };
}
