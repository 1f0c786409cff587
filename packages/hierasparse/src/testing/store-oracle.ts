import { decode, HeldRows } from '@kv/sparse-core/testing';
import { blockTokens, type KvOperand } from '../blocks-24.js';
import { pruned } from './sparse-oracle.js';

/** What a store should hold of one kv head of one sequence, in plain steps. */
export class HeadOracle extends HeldRows {
  readonly #sparse: Record<KvOperand, Set<number>> = { keys: new Set(), values: new Set() };
  #end = 0;

  override clone(): HeadOracle {
    const copy = new HeadOracle(this.dtype, this.headDim);
    copy.take(this);
    for (const operand of ['keys', 'values'] as const) copy.#sparse[operand] = new Set(this.#sparse[operand]);
    copy.#end = this.#end;
    return copy;
  }

  /** Equation 2d over the blocks between the first `sinkBlocks` and the last `localWindow` tokens. */
  prune(
    shares: Record<KvOperand, number>,
    sinkBlocks: number,
    localWindow: number,
    lossOf = (operand: KvOperand, block: number) => this.#loss(operand, block),
    keptOf = (operand: KvOperand, block: Uint16Array) => pruned(operand, this.headDim, block),
  ): void {
    this.#end = Math.max(this.#end, sinkBlocks, Math.floor((this.count - localWindow) / blockTokens));
    const range = Array.from({ length: this.#end - sinkBlocks }, (_, index) => sinkBlocks + index);
    for (const operand of ['keys', 'values'] as const) {
      const sparse = this.#sparse[operand];
      const count = Math.max(0, Math.round(shares[operand] * range.length) - sparse.size);
      const least = range
        .filter((block) => !sparse.has(block))
        .map((block) => ({ block, loss: lossOf(operand, block) }))
        .sort((a, b) => a.loss - b.loss || a.block - b.block)
        .slice(0, count);
      if (least.length === 0) continue;
      const rows = this.rows[operand].slice();
      for (const { block } of least) {
        sparse.add(block);
        rows.set(keptOf(operand, this.#block(operand, block)), block * blockTokens * this.headDim);
      }
      this.rows[operand] = rows;
    }
  }

  /** Nothing comes back that was not kept. */
  makeDense(): void {
    for (const sparse of Object.values(this.#sparse)) sparse.clear();
    this.#end = 0;
  }

  /** Bytes by equations 5a to 5d, with index maps of 32 bits. */
  bytes(): number {
    const blocks = Math.ceil(this.count / blockTokens);
    const dense = blockTokens * this.headDim * 2;
    const sparse = this.#sparse.keys.size + this.#sparse.values.size;
    return (2 * blocks - sparse) * dense + sparse * dense * (1 / 2 + 1 / 16) + 2 * blocks * 4;
  }

  #block(operand: KvOperand, block: number): Uint16Array {
    const elements = blockTokens * this.headDim;
    return this.rows[operand].slice(block * elements, (block + 1) * elements);
  }

  #loss(operand: KvOperand, block: number): number {
    const sum = (elements: Uint16Array) =>
      decode(this.dtype, elements).reduce((total, x) => total + Math.abs(x), 0);
    const whole = this.#block(operand, block);
    return sum(whole) - sum(pruned(operand, this.headDim, whole));
  }
}
