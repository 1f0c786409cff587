import type { KvOperand } from '../mixed-blocks.js';
import type { MixedBlockPools } from './mixed-block-pools.js';

/** What becomes sparse of one head, as `compress24` takes it. */
export interface HeadPruning {
  readonly firstBlock: number;
  readonly endBlock: number;
  readonly sparseIds: readonly number[];
  readonly freedFrom: number;
}

/** Blocks of the pools that one kv head of one slot holds: which ones the host knows, though not always of what. */
export class HeadBlocks {
  readonly #pools: MixedBlockPools;
  readonly #sinkBlocks: number;
  readonly #shares: Readonly<Record<KvOperand, number>>;
  /** Pairs of blocks that no pruning has had in its range, in the order of the sequence. */
  #paired: number[] = [];
  /** How many blocks, behind the sinks, prunings have had in their range; what of them is where, the device knows. */
  #candidates = 0;
  #dense: Record<KvOperand, number[]> = { keys: [], values: [] };
  #sparse: Record<KvOperand, number[]> = { keys: [], values: [] };

  /** @param shares the most that becomes sparse */
  constructor(pools: MixedBlockPools, sinkBlocks: number, shares: Readonly<Record<KvOperand, number>>) {
    this.#pools = pools;
    this.#sinkBlocks = sinkBlocks;
    this.#shares = shares;
  }

  get count(): number {
    return this.#paired.length + this.#candidates;
  }

  /** Whether a block may be sparse. */
  get pruned(): boolean {
    return this.#candidates > 0;
  }

  /** The blocks of a head that is not pruned. */
  get pairs(): readonly number[] {
    return this.#paired;
  }

  /** How many sparse blocks more the head may need with so many blocks more, or less. */
  becomeSparse(operand: KvOperand, more: number): number {
    const most = (count: number) => Math.round(this.#shares[operand] * Math.max(0, count - this.#sinkBlocks));
    return most(this.count + more) - most(this.count);
  }

  add(pairs: readonly number[]): void {
    this.#promise(pairs.length);
    this.#paired.push(...pairs);
  }

  /** Returns the blocks from `count` on, of a head that is not pruned. */
  truncate(count: number): void {
    this.#promise(Math.min(0, count - this.count));
    this.#pools.freePairs(this.#paired.splice(count));
  }

  /** Puts the blocks below `endBlock`, but for the sinks, in the range of a pruning. */
  extendRange(endBlock: number): void {
    const fresh = this.#paired.splice(
      this.#sinkBlocks,
      Math.max(0, endBlock - this.#sinkBlocks - this.#candidates),
    );
    this.#candidates += fresh.length;
    for (const operand of ['keys', 'values'] as const) this.#dense[operand].push(...fresh);
  }

  /** Brings the sparse share of the range up to `share`; undefined when it is that already. */
  prune(operand: KvOperand, share: number): HeadPruning | undefined {
    const sparse = this.#sparse[operand];
    const count = Math.round(share * this.#candidates) - sparse.length;
    if (count <= 0) return undefined;
    const dense = this.#dense[operand].sort((a, b) => a - b);
    const sparseIds = this.#pools.sparse[operand].ids.allocate(count);
    const freed = dense.splice(dense.length - count);
    sparse.push(...sparseIds);
    this.#pools.freeHalves(freed);
    const endBlock = this.#sinkBlocks + this.#candidates;
    return { firstBlock: this.#sinkBlocks, endBlock, sparseIds, freedFrom: freed[0] ?? 0 };
  }

  /** Bytes of the blocks, and of the two entries of the index maps for each (equations 5a to 5d). */
  bytes(): number {
    const { denseBytes, sparseBytes } = this.#pools;
    const both = (blocks: Record<KvOperand, readonly number[]>) => blocks.keys.length + blocks.values.length;
    const dense = 2 * this.#paired.length + both(this.#dense);
    return (
      dense * denseBytes + both(this.#sparse) * sparseBytes + 2 * this.count * Int32Array.BYTES_PER_ELEMENT
    );
  }

  release(): void {
    this.#promise(-this.count);
    this.#pools.freePairs(this.#paired);
    for (const operand of ['keys', 'values'] as const) {
      this.#pools.freeHalves(this.#dense[operand]);
      this.#pools.sparse[operand].ids.free(this.#sparse[operand]);
    }
    this.#paired = [];
    this.#candidates = 0;
    this.#dense = { keys: [], values: [] };
    this.#sparse = { keys: [], values: [] };
  }

  /** Before so many blocks come, or go. */
  #promise(more: number): void {
    for (const operand of ['keys', 'values'] as const) {
      this.#pools.sparse[operand].promised += this.becomeSparse(operand, more);
    }
  }
}
