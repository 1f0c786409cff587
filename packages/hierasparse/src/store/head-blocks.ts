import { joinedIds } from '@kv/sparse-core/native';
import { anySparse, type Shares } from '../block-sparsity.js';
import { blockTokens, type KvOperand, operands } from '../blocks-24.js';
import type { BlockNeeds, BlockPools24 } from './block-pools-24.js';

/** What becomes sparse of one head, as `compress24` takes it. */
export interface HeadPruning {
  readonly firstBlock: number;
  readonly endBlock: number;
  readonly sparseIds: Int32Array;
  readonly freedFrom: number;
}

/** What holds for all heads of a layer. */
export interface HeadRules {
  readonly pools: BlockPools24;
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
const none = new Int32Array();

/** Of keys and of values. */
type Blocks = Readonly<Record<KvOperand, Int32Array>>;

/**
 * Blocks of the pools that one kv head of one slot holds: which ones the host knows, though not always of what. A list
 * of blocks is never changed, but another takes its place, so that forks hold the same lists.
 */
export class HeadBlocks {
  readonly #rules: HeadRules;
  #finished = false;
  /** Pairs of blocks that no pruning has had in its range, in the order of the sequence. */
  #pairs: Int32Array = none;
  /** How many blocks, behind the sinks, prunings have had in their range; what of them is where, the device knows. */
  #candidates = 0;
  /** Places in the dense pool, and sparse blocks, of the candidates. */
  #dense: Blocks = { keys: none, values: none };
  #sparse: Blocks = { keys: none, values: none };
  /** How many of the dense ones are singles. */
  #singles = 0;
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

  add(pairs: Int32Array): void {
    this.#pairs = joinedIds(this.#pairs, pairs);
    this.#settle();
  }

  /** Pairs of the first `count` blocks, where none may be sparse. */
  pairsBelow(count: number): HeldBlocks[] {
    return Array.from(this.#pairs.subarray(0, count), (pair) => this.#wholePair(pair));
  }

  /** The pair of a block that is not in the range of prunings; undefined when there is none yet. */
  pairAt(block: number): number | undefined {
    return this.#pairs[block < this.#rules.sinkBlocks ? block : block - this.#candidates];
  }

  /** The same, when others hold it too. */
  sharedPairOf(block: number): HeldBlocks | undefined {
    const pair = this.pairAt(block);
    return pair === undefined || this.#rules.pools.pairIds.holders(pair) <= 2 ? undefined : this.#wholePair(pair);
  }

  /** Places of dense blocks, in no order. */
  get places(): Int32Array {
    const { pools } = this.#rules;
    return joinedIds(...operands.flatMap((operand) => [pools.placesOf(operand, this.#pairs), this.#dense[operand]]));
  }

  sparseIds(operand: KvOperand): Int32Array {
    return this.#sparse[operand];
  }

  /** Where the blocks end that may be sparse, in tokens. */
  get sparseEnd(): number {
    return this.pruned ? this.endBlock * blockTokens : 0;
  }

  /** Returns the blocks from `count` on, none of which may be sparse. */
  truncate(count: number): void {
    const left = count - this.#candidates;
    this.#rules.pools.freePairs(this.#pairs.subarray(left));
    this.#pairs = this.#pairs.slice(0, left);
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
  extendRange(endBlock: number): Int32Array {
    const pairs = this.#pairsUpTo(endBlock);
    const { sinkBlocks } = this.#rules;
    this.#pairs = joinedIds(this.#pairs.subarray(0, sinkBlocks), this.#pairs.subarray(sinkBlocks + pairs.length));
    this.#candidates += pairs.length;
    return pairs;
  }

  /** Where the blocks are in the dense pool that the range was extended by. */
  place(operand: KvOperand, places: Int32Array): void {
    this.#dense = { ...this.#dense, [operand]: joinedIds(this.#dense[operand], places) };
    this.#singles += this.#rules.pools.countSingles(places);
    this.#settle();
  }

  /**
   * The blocks that prunings up to `endBlock` may write to: where some of the dense ones of the range become sparse, and
   * not all, others move into their places.
   */
  movedBy(endBlock: number, targets: readonly Shares[]): HeldBlocks[] {
    if (targets.every((shares) => this.settled(endBlock, shares))) return [];
    const { pools } = this.#rules;
    const added = this.#pairsUpTo(endBlock);
    const more = Math.max(0, endBlock - this.endBlock);
    const moved = targets.flatMap((shares) =>
      operands.flatMap((operand) => {
        const [share, held] = [shares[operand], this.#dense[operand]];
        const count = Math.round(share * (this.#candidates + more)) - this.#sparse[operand].length;
        if (count <= 0 || count >= held.length + more) return [];
        return this.needsSingle(share) ? [...held] : [...held, ...pools.placesOf(operand, added)];
      }),
    );
    return moved.length === 0 ? [] : this.#heldAt(new Set(moved), added);
  }

  /** Others have taken the places of dense blocks; a pair has the number of the place of its keys. */
  replace(places: ReadonlyMap<number, number>): void {
    const other = (place: number) => places.get(place) ?? place;
    this.#pairs = this.#pairs.map(other);
    this.#dense = { keys: this.#dense.keys.map(other), values: this.#dense.values.map(other) };
  }

  /** Brings the sparse part of the range up to `share`; undefined when it is that already. */
  prune(operand: KvOperand, share: number): HeadPruning | undefined {
    const { pools, sinkBlocks } = this.#rules;
    const count = this.#missing(operand, share);
    if (count <= 0) return undefined;
    const sparseIds = pools.sparse[operand].ids.allocate(count);
    const dense = this.#dense[operand].toSorted();
    const left = dense.length - count;
    const freed = dense.subarray(left);
    this.#dense = { ...this.#dense, [operand]: dense.slice(0, left) };
    this.#sparse = { ...this.#sparse, [operand]: joinedIds(this.#sparse[operand], sparseIds) };
    this.#singles -= pools.countSingles(freed);
    pools.freeDense(freed);
    this.#settle();
    return { firstBlock: sinkBlocks, endBlock: this.endBlock, sparseIds, freedFrom: freed[0] ?? 0 };
  }

  /** The range is dense again, in these pairs. */
  makeDense(pairs: Int32Array): void {
    const { sinkBlocks } = this.#rules;
    this.#freeCandidates();
    this.#pairs = joinedIds(this.#pairs.subarray(0, sinkBlocks), pairs, this.#pairs.subarray(sinkBlocks));
    this.#candidates = 0;
    this.#settle();
  }

  /** Makes an empty head share the first `count` blocks of another, but for the last one if `last` takes its place. */
  copy(from: HeadBlocks, count: number, last: number | undefined): void {
    const { pools } = this.#rules;
    const pairs = from.#pairs.slice(0, count - from.#candidates);
    const shared = last === undefined ? pairs : pairs.subarray(0, -1);
    this.#pairs = last === undefined ? pairs : joinedIds(shared, Int32Array.of(last));
    this.#dense = from.#dense;
    this.#singles = from.#singles;
    this.#sparse = from.#sparse;
    this.#candidates = from.#candidates;
    this.#finished = from.#finished;
    pools.sharePairs(shared);
    for (const operand of operands) {
      pools.shareDense(this.#dense[operand]);
      pools.sparse[operand].ids.share(this.#sparse[operand]);
    }
    this.#settle();
  }

  release(): void {
    this.#rules.pools.freePairs(this.#pairs);
    this.#freeCandidates();
    this.#finished = false;
    this.#pairs = none;
    this.#candidates = 0;
    this.#settle();
  }

  #freeCandidates(): void {
    const { pools } = this.#rules;
    for (const operand of operands) {
      pools.freeDense(this.#dense[operand]);
      pools.sparse[operand].ids.free(this.#sparse[operand]);
    }
    this.#dense = { keys: none, values: none };
    this.#singles = 0;
    this.#sparse = { keys: none, values: none };
  }

  /** The pairs by which the range would grow to reach `endBlock`. */
  #pairsUpTo(endBlock: number): Int32Array {
    const { sinkBlocks } = this.#rules;
    return this.#pairs.slice(sinkBlocks, sinkBlocks + Math.max(0, endBlock - this.endBlock));
  }

  /** How many sparse blocks the range lacks. */
  #missing(operand: KvOperand, share: number): number {
    return Math.round(share * this.#candidates) - this.#sparse[operand].length;
  }

  #wholePair(pair: number): HeldBlocks {
    const places = operands.map((operand) => this.#rules.pools.placeOf(operand, pair));
    return { kind: 'pair', id: pair, places, holds: places.length };
  }

  /** What is at these places of candidates, and of pairs that are to be candidates. */
  #heldAt(places: ReadonlySet<number>, added: Int32Array): HeldBlocks[] {
    const { pools } = this.#rules;
    const whole = new Set(added);
    const candidates = new Set([...this.#dense.keys, ...this.#dense.values]);
    const ofPair = (pair: number): HeldBlocks => {
      const both = this.#wholePair(pair);
      const held = whole.has(pair) ? both.places : both.places.filter((place) => candidates.has(place));
      return { ...both, places: held, holds: held.length };
    };
    const singles = [...places].filter((place) => pools.isSingle(place));
    const pairs = new Set([...places].filter((place) => !pools.isSingle(place)).map((place) => pools.idAt(place)));
    return [
      ...[...pairs].map(ofPair),
      ...singles.map((place) => ({ kind: 'single' as const, id: pools.idAt(place), places: [place], holds: 1 })),
    ];
  }

  /** Blocks that are held, beside pairs. */
  get #held(): BlockNeeds {
    return { keys: this.#sparse.keys.length, values: this.#sparse.values.length, singles: this.#singles };
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
