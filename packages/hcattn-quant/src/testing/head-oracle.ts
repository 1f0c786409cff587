import type { KvBytes } from '@kv/sparse-core';
import { attentionRow, type CacheDType, decode, encode, HeldRows, type OracleRow } from '@kv/sparse-core/testing';
import type { MissingMass } from '../operations/select-by-mass.js';
import { blockTokens } from '../quantized-blocks.js';
import type { BlockOracle, Operand } from './block-oracles.js';

export interface HeadOptions {
  readonly dtype: CacheDType;
  readonly headDim: number;
  readonly blocks: BlockOracle;
  readonly sinkBlocks: number;
  /** Tokens. */
  readonly localWindow: number;
  /** Whether blocks of a prompt are in host memory as they are until it is complete: their bytes. */
  readonly stagedBytes?: number | undefined;
  /** Rows of the first prompt see the first so many tokens, and those of their own such block. */
  readonly promptBlockTokens?: number | undefined;
}

/** How near a sum of weights may come to `tau`: no f32 sum says otherwise then. */
const margin = 1e-5;

function mass(scores: readonly number[], tokens: readonly number[]): number {
  return tokens.reduce((sum, token) => sum + Math.exp(scores[token] ?? NaN), 0);
}

/** Appendix B: the tokens that the row of a position sees, its own among them. */
function seenTokens(position: number, size = Infinity): number[] {
  const own = size === Infinity ? 0 : Math.floor(position / size) * size;
  return Array.from({ length: position + 1 }, (_, token) => token).filter((token) => token < size || token >= own);
}

/** What a store should hold of one kv head of one sequence, in plain steps. */
export class HeadOracle extends HeldRows {
  /** The share of a row's attention that it reads the fewest codes for; 1 reads all. */
  tau = 1;
  /** What becomes of the weight of what it does not read. */
  missingMass: MissingMass = 'renormalise';
  /** Whether its prompt is complete. */
  finished = false;
  /** Whether rows are those of a prompt, which see staged blocks as they are. */
  readsPrompt = false;
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
    copy.tau = this.tau;
    copy.missingMass = this.missingMass;
    copy.finished = this.finished;
    copy.readsPrompt = this.readsPrompt;
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

  /** Whether what was quantized passes through host memory. */
  get #isStaged(): boolean {
    return this.#options.stagedBytes !== undefined && !this.finished;
  }

  /** How many quantized blocks are staged: those that the next row sees. */
  get #staged(): number {
    if (!this.#isStaged) return 0;
    const { sinkBlocks, promptBlockTokens: size } = this.#options;
    const blocks = Array.from({ length: this.#quantized }, (_, index) => sinkBlocks + index);
    return blocks.filter((block) => seenTokens(this.count, size).includes(block * blockTokens)).length;
  }

  /** A quantized block that is cut is dense again: what its codes said, rounded to elements, unless it is staged. */
  override truncate(tokens: number): void {
    const { sinkBlocks, dtype, headDim } = this.#options;
    const size = blockTokens * headDim;
    const cut = Math.floor((this.count - tokens) / blockTokens);
    if (cut >= sinkBlocks && cut < sinkBlocks + this.#quantized && !this.#isStaged) {
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

  bytes(): KvBytes {
    const { blocks, headDim, stagedBytes = 0 } = this.#options;
    const dense = Math.ceil(this.count / blockTokens) - this.#quantized;
    return {
      device: dense * 2 * blockTokens * headDim * 2 + this.#quantized * blocks.bytes.device,
      host: this.#quantized * blocks.bytes.host + this.#staged * stagedBytes,
    };
  }

  override attention(): (query: Float64Array, visible: number, weightRoundoff: number) => OracleRow {
    const { headDim, promptBlockTokens: size } = this.#options;
    const inBlocks = this.readsPrompt && !this.finished && size !== undefined;
    if (this.tau === 1 && !inBlocks) return super.attention();
    const [keys, values] = [this.numbers('keys'), this.numbers('values')];
    const chosenBy = this.#chosenBy(keys);
    const rowOf = (numbers: Float64Array, token: number) => numbers.subarray(token * headDim, (token + 1) * headDim);
    if (inBlocks) {
      return (query, visible, weightRoundoff) => {
        const seen = seenTokens(visible - 1, size);
        const row = (numbers: Float64Array) => (index: number) => rowOf(numbers, seen[index] ?? NaN);
        return attentionRow(query, seen.length, headDim ** -0.5, row(keys), row(values), weightRoundoff);
      };
    }
    return (query, _visible, weightRoundoff) => {
      const scores = Array.from({ length: this.count }, (_, token) =>
        rowOf(chosenBy, token).reduce((sum, x, dim) => sum + (x * (query[dim] ?? NaN)) / Math.sqrt(headDim), 0),
      );
      const read = this.#read(scores);
      const row = (numbers: Float64Array) => (index: number) => rowOf(numbers, read[index] ?? NaN);
      const found = attentionRow(query, read.length, headDim ** -0.5, row(keys), row(values), weightRoundoff);
      if (this.missingMass === 'renormalise') return found;
      const left = mass(scores, read) / mass(scores, Array.from(scores.keys()));
      const mean = this.missingMass === 'paper' ? new Float64Array(headDim) : this.#meanValue(values);
      return { ...found, output: found.output.map((x, dim) => x * left + (1 - left) * (mean[dim] ?? NaN)) };
    };
  }

  /** The keys by whose scores tokens are chosen. */
  #chosenBy(keys: Float64Array): Float64Array {
    const { sinkBlocks, headDim, blocks } = this.#options;
    if (blocks.chosenBy === undefined) return keys;
    const size = blockTokens * headDim;
    const all = keys.slice();
    for (let block = sinkBlocks; block < sinkBlocks + this.#quantized; block++) {
      all.set(blocks.chosenBy(keys.subarray(block * size, (block + 1) * size)), block * size);
    }
    return all;
  }

  /** Of the quantized tokens, rounded to an element. */
  #meanValue(values: Float64Array): Float64Array {
    const { sinkBlocks, headDim, dtype } = this.#options;
    const sum = new Float32Array(headDim);
    const coded = values.subarray(sinkBlocks * blockTokens * headDim, (sinkBlocks + this.#quantized) * blockTokens * headDim);
    coded.forEach((x, index) => (sum[index % headDim] = (sum[index % headDim] ?? NaN) + x));
    return decode(dtype, encode(dtype, Float64Array.from(sum, (x) => Math.fround(x / (this.#quantized * blockTokens)))));
  }

  /** All that is dense, and of the others the fewest, best first, that reach the share. */
  #read(scores: readonly number[]): number[] {
    const { sinkBlocks } = this.#options;
    const isCoded = (token: number) => token >= sinkBlocks * blockTokens && token < (sinkBlocks + this.#quantized) * blockTokens;
    const tokens = Array.from(scores.keys());
    const read = tokens.filter((token) => !isCoded(token));
    const others = tokens.filter(isCoded).sort((one, other) => (scores[other] ?? NaN) - (scores[one] ?? NaN) || one - other);
    const [all, dense] = [mass(scores, tokens), mass(scores, read)];
    for (let share = dense / all; share < this.tau; share += mass(scores, others.splice(0, 1)) / all) {
      if (this.tau - share < margin) throw new Error(`a share of ${share} is too near to be told from ${this.tau} in f32`);
      read.push(others[0] ?? NaN);
    }
    return read.sort((one, other) => one - other);
  }

  protected override numbers(operand: Operand): Float64Array {
    const { sinkBlocks, blocks, dtype, headDim } = this.#options;
    const numbers = decode(dtype, this.rows[operand]);
    if (this.readsPrompt && this.#isStaged) return numbers;
    const size = blockTokens * headDim;
    for (let block = sinkBlocks; block < sinkBlocks + this.#quantized; block++) {
      const rows = numbers.subarray(block * size, (block + 1) * size);
      const known = this.#decoded[operand].get(block);
      const decoded = known ?? blocks.decoded(operand, rows);
      this.#decoded[operand].set(block, decoded);
      rows.set(decoded);
    }
    return numbers;
  }
}
