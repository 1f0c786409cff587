import { attentionRow, decode, type OracleRow, unitRoundoff } from '@kv/sparse-core/testing';
import { blockTokens, type KvOperand, type SparseDType } from '../blocks-24.js';
import { pruned } from './sparse-oracle.js';

/** What a store should hold of one kv head of one sequence, in plain steps. */
export class HeadOracle {
  readonly #dtype: SparseDType;
  readonly #headDim: number;
  /** `[token, dim]`. Replaced, never written to: a clone has the same. */
  readonly #rows: Record<KvOperand, Uint16Array> = { keys: new Uint16Array(), values: new Uint16Array() };
  readonly #sparse: Record<KvOperand, Set<number>> = { keys: new Set(), values: new Set() };
  #end = 0;

  constructor(dtype: SparseDType, headDim: number) {
    this.#dtype = dtype;
    this.#headDim = headDim;
  }

  get count(): number {
    return this.#rows.keys.length / this.#headDim;
  }

  clone(): HeadOracle {
    const copy = new HeadOracle(this.#dtype, this.#headDim);
    for (const operand of ['keys', 'values'] as const) {
      copy.#rows[operand] = this.#rows[operand];
      copy.#sparse[operand] = new Set(this.#sparse[operand]);
    }
    copy.#end = this.#end;
    return copy;
  }

  append(operand: KvOperand, elements: Uint16Array): void {
    this.#rows[operand] = joined([this.#rows[operand], elements]);
  }

  /** Equation 2d over the blocks between the first `sinkBlocks` and the last `localWindow` tokens. */
  prune(
    shares: Record<KvOperand, number>,
    sinkBlocks: number,
    localWindow: number,
    lossOf = (operand: KvOperand, block: number) => this.#loss(operand, block),
    keptOf = (operand: KvOperand, block: Uint16Array) => pruned(operand, this.#headDim, block),
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
      const rows = this.#rows[operand].slice();
      for (const { block } of least) {
        sparse.add(block);
        rows.set(keptOf(operand, this.#block(operand, block)), block * blockTokens * this.#headDim);
      }
      this.#rows[operand] = rows;
    }
  }

  /** Nothing comes back that was not kept. */
  makeDense(): void {
    for (const sparse of Object.values(this.#sparse)) sparse.clear();
    this.#end = 0;
  }

  truncate(tokens: number): void {
    const left = (this.count - tokens) * this.#headDim;
    for (const operand of ['keys', 'values'] as const) this.#rows[operand] = this.#rows[operand].slice(0, left);
  }

  keep(indices: readonly number[]): void {
    for (const operand of ['keys', 'values'] as const) {
      const rows = this.#rows[operand];
      this.#rows[operand] = joined(indices.map((token) => rows.subarray(token * this.#headDim, (token + 1) * this.#headDim)));
    }
  }

  /** Attention over the tokens that the head holds now. */
  attention(): (query: Float64Array, visible: number, weightRoundoff: number) => OracleRow {
    const row = (operand: KvOperand) => {
      const numbers = decode(this.#dtype, this.#rows[operand]);
      return (token: number) => numbers.subarray(token * this.#headDim, (token + 1) * this.#headDim);
    };
    const [keys, values] = [row('keys'), row('values')];
    return (query, visible, weightRoundoff) =>
      attentionRow(query, visible, this.#headDim ** -0.5, keys, values, weightRoundoff);
  }

  /** Bytes by equations 5a to 5d, with index maps of 32 bits. */
  bytes(): number {
    const blocks = Math.ceil(this.count / blockTokens);
    const dense = blockTokens * this.#headDim * 2;
    const sparse = this.#sparse.keys.size + this.#sparse.values.size;
    return (2 * blocks - sparse) * dense + sparse * dense * (1 / 2 + 1 / 16) + 2 * blocks * 4;
  }

  #block(operand: KvOperand, block: number): Uint16Array {
    const elements = blockTokens * this.#headDim;
    return this.#rows[operand].slice(block * elements, (block + 1) * elements);
  }

  #loss(operand: KvOperand, block: number): number {
    const sum = (elements: Uint16Array) =>
      decode(this.#dtype, elements).reduce((total, x) => total + Math.abs(x), 0);
    const whole = this.#block(operand, block);
    return sum(whole) - sum(pruned(operand, this.#headDim, whole));
  }
}

function joined(parts: readonly Uint16Array[]): Uint16Array {
  const all = new Uint16Array(parts.reduce((sum, { length }) => sum + length, 0));
  let written = 0;
  for (const part of parts) {
    all.set(part, written);
    written += part.length;
  }
  return all;
}

/** By how much a computed row is further from the oracle's than rounding allows; at most 0 when it is right. */
export function excess(wanted: OracleRow, got: Float64Array, stored: 'f32' | SparseDType): number {
  // 2^-25: half of the smallest f16.
  const allowed = (x: number) => wanted.outputError + unitRoundoff[stored] * Math.abs(x) + 2 ** -25;
  return Math.max(...wanted.output.map((x, index) => Math.abs((got[index] ?? NaN) - x) - allowed(x)));
}
