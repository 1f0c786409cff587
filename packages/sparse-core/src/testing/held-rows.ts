import { attentionRow, type OracleRow } from './attention-oracle.js';
import { decode, unitRoundoff } from './random.js';

export type CacheDType = 'f16' | 'bf16';
type Operand = 'keys' | 'values';

/** The keys and values of one kv head of one sequence, in plain steps: what a store should hold. */
export class HeldRows {
  protected readonly dtype: CacheDType;
  protected readonly headDim: number;
  /** `[token, dim]`. Replaced, never written to: a clone has the same. */
  protected readonly rows: Record<Operand, Uint16Array> = { keys: new Uint16Array(), values: new Uint16Array() };

  constructor(dtype: CacheDType, headDim: number) {
    this.dtype = dtype;
    this.headDim = headDim;
  }

  get count(): number {
    return this.rows.keys.length / this.headDim;
  }

  clone(): HeldRows {
    const copy = new HeldRows(this.dtype, this.headDim);
    copy.take(this);
    return copy;
  }

  append(operand: Operand, elements: Uint16Array): void {
    this.rows[operand] = joined([this.rows[operand], elements]);
  }

  truncate(tokens: number): void {
    const left = (this.count - tokens) * this.headDim;
    for (const operand of ['keys', 'values'] as const) this.rows[operand] = this.rows[operand].slice(0, left);
  }

  keep(indices: readonly number[]): void {
    for (const operand of ['keys', 'values'] as const) {
      const rows = this.rows[operand];
      this.rows[operand] = joined(indices.map((token) => rows.subarray(token * this.headDim, (token + 1) * this.headDim)));
    }
  }

  /** Attention over the tokens that the head holds now. */
  attention(): (query: Float64Array, visible: number, weightRoundoff: number) => OracleRow {
    const row = (operand: Operand) => {
      const numbers = this.numbers(operand);
      return (token: number) => numbers.subarray(token * this.headDim, (token + 1) * this.headDim);
    };
    const [keys, values] = [row('keys'), row('values')];
    return (query, visible, weightRoundoff) => attentionRow(query, visible, this.headDim ** -0.5, keys, values, weightRoundoff);
  }

  /** What is attended to, `[token, dim]`. */
  protected numbers(operand: Operand): Float64Array {
    return decode(this.dtype, this.rows[operand]);
  }

  protected take(other: HeldRows): void {
    for (const operand of ['keys', 'values'] as const) this.rows[operand] = other.rows[operand];
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
export function excess(wanted: OracleRow, got: Float64Array, stored: 'f32' | CacheDType): number {
  // 2^-25: half of the smallest f16.
  const allowed = (x: number) => wanted.outputError + unitRoundoff[stored] * Math.abs(x) + 2 ** -25;
  return Math.max(...wanted.output.map((x, index) => Math.abs((got[index] ?? NaN) - x) - allowed(x)));
}
