import { type CacheDType, decode, encode, HeldRows } from '@kv/sparse-core/testing';
import { blockTokens, type CodeBits, quantizedBlockBytes } from '../quantized-blocks.js';
import { dequantized, quantized } from './quantized-oracle.js';

type Operand = 'keys' | 'values';

export interface HeadOptions {
  readonly dtype: CacheDType;
  readonly headDim: number;
  readonly bits: Readonly<Record<Operand, CodeBits>>;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
}

/** What a store should hold of one kv head of one sequence, in plain steps. */
export class HeadOracle extends HeldRows {
  readonly #options: HeadOptions;
  /** Blocks behind the sinks that are quantized. */
  #quantized = 0;
  /** What the codes of these say, where it was asked for: it takes long. */
  readonly #decoded: Record<Operand, Map<number, Float64Array>> = { keys: new Map(), values: new Map() };

  constructor(options: HeadOptions) {
    super(options.dtype, options.headDim);
    this.#options = options;
  }

  override clone(): HeadOracle {
    const copy = new HeadOracle(this.#options);
    copy.take(this);
    copy.#quantized = this.#quantized;
    for (const operand of ['keys', 'values'] as const) {
      for (const [block, rows] of this.#decoded[operand]) copy.#decoded[operand].set(block, rows);
    }
    return copy;
  }

  /** What left the local window, as it must be now. */
  quantize(): void {
    const { sinkBlocks, localWindow } = this.#options;
    const end = Math.floor((this.count - localWindow) / blockTokens);
    this.#quantized = Math.max(this.#quantized, end - sinkBlocks);
  }

  /** A quantized block that is cut is dense again: what its codes said, rounded to elements. */
  override truncate(tokens: number): void {
    const { sinkBlocks, dtype, headDim } = this.#options;
    const size = blockTokens * headDim;
    const cut = Math.floor((this.count - tokens) / blockTokens);
    if (cut >= sinkBlocks && cut < sinkBlocks + this.#quantized) {
      for (const operand of ['keys', 'values'] as const) {
        const rows = this.rows[operand].slice();
        rows.set(encode(dtype, this.numbers(operand).subarray(cut * size, (cut + 1) * size)), cut * size);
        this.rows[operand] = rows;
      }
    }
    this.#quantized = Math.min(this.#quantized, Math.max(0, cut - sinkBlocks));
    for (const decoded of Object.values(this.#decoded)) {
      for (const block of decoded.keys()) if (block >= sinkBlocks + this.#quantized) decoded.delete(block);
    }
    super.truncate(tokens);
  }

  bytes(): number {
    const { bits, headDim } = this.#options;
    const dense = Math.ceil(this.count / blockTokens) - this.#quantized;
    const codes = quantizedBlockBytes(headDim, bits.keys) + quantizedBlockBytes(headDim, bits.values);
    return dense * 2 * blockTokens * headDim * 2 + this.#quantized * codes;
  }

  protected override numbers(operand: Operand): Float64Array {
    const { sinkBlocks, bits, dtype, headDim } = this.#options;
    const numbers = decode(dtype, this.rows[operand]);
    const size = blockTokens * headDim;
    for (let block = sinkBlocks; block < sinkBlocks + this.#quantized; block++) {
      const rows = numbers.subarray(block * size, (block + 1) * size);
      const known = this.#decoded[operand].get(block);
      const decoded = known ?? dequantized(quantized(rows, headDim, bits[operand]), headDim, bits[operand]);
      this.#decoded[operand].set(block, decoded);
      rows.set(decoded);
    }
    return numbers;
  }
}
