import type { ElementArray, FloatDType } from '../dtype.js';
import type { Device } from '../handles.js';
import type { PagedBlocks } from '../paged-blocks.js';
import { DescendingSlots } from './descending-slots.js';
import { decode, encode, type Random, unitRoundoff } from './random.js';

/** Sizes of a random attention problem. */
export interface AttentionSizes {
  /** Rows of each batch entry. */
  readonly rows: readonly number[];
  /** Keys of each batch entry and kv head, the entry's own rows included. */
  readonly keyCounts: readonly (readonly number[])[];
  readonly kvHeads: number;
  /** Query heads of each kv head. */
  readonly group: number;
  readonly dim: number;
  readonly blockTokens: number;
  readonly cacheDType: FloatDType;
  /** Of queries and outputs. Default: random ones. */
  readonly rowDType?: FloatDType | undefined;
  /** The first number of every key and query, so that all scores move by its square times the scale. */
  readonly shift?: number | undefined;
}

/** Random rows of `dim` numbers; the first of each is `shift`, if there is one. */
export function randomRows<D extends FloatDType>(
  random: Random,
  dtype: D,
  count: number,
  { dim, shift }: AttentionSizes,
): ElementArray<D> {
  const elements = random.elements(dtype, count * dim);
  if (shift === undefined) return elements;
  const [first = NaN] = encode(dtype, [shift]);
  for (let index = 0; index < elements.length; index += dim) elements[index] = first;
  return elements;
}

/** A paged cache of random keys and values; its blocks are in random order, its slots in descending order. */
export interface RandomCache {
  readonly blocks: PagedBlocks;
  readonly slots: Int32Array;
  readonly queryStart: Int32Array;
  /** The stored numbers of one token's key (or value). */
  key(entry: number, kvHead: number, token: number): Float64Array;
  value(entry: number, kvHead: number, token: number): Float64Array;
  dispose(): void;
}

export function randomCache(device: Device, random: Random, sizes: AttentionSizes): RandomCache {
  const { rows, keyCounts, kvHeads, dim, blockTokens, cacheDType } = sizes;
  const batch = rows.length;
  const width = Math.ceil(Math.max(1, ...keyCounts.flat()) / blockTokens) + 1;
  const order = random.permutation(batch * kvHeads * width);
  const sequences = new DescendingSlots(rows, keyCounts, kvHeads);
  const shape = [order.length, blockTokens, dim] as const;
  const keys = randomRows(random, cacheDType, order.length * blockTokens, sizes);
  const values = random.elements(cacheDType, order.length * blockTokens * dim);
  const [keyNumbers, valueNumbers] = [decode(cacheDType, keys), decode(cacheDType, values)];
  const row = (numbers: Float64Array, entry: number, kvHead: number, token: number) => {
    const block = order[sequences.tableRow(entry, kvHead) * width + Math.floor(token / blockTokens)] ?? NaN;
    const first = (block * blockTokens + (token % blockTokens)) * dim;
    return numbers.subarray(first, first + dim);
  };
  const blocks = {
    keys: device.tensor(cacheDType, ['block', 'blockToken', 'dim'], shape, keys),
    values: device.tensor(cacheDType, ['block', 'blockToken', 'dim'], shape, values),
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [batch, kvHeads, width], order),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [batch, kvHeads], sequences.keyCounts),
  };
  return {
    blocks,
    slots: sequences.slots,
    queryStart: sequences.queryStart,
    key: (entry, kvHead, token) => row(keyNumbers, entry, kvHead, token),
    value: (entry, kvHead, token) => row(valueNumbers, entry, kvHead, token),
    dispose() {
      for (const tensor of Object.values(blocks)) tensor.dispose();
    },
  };
}

export interface OracleRow {
  readonly output: Float64Array;
  readonly logSumExp: number;
  /** The most that f32 arithmetic may add to an element of `output`, before it is stored. */
  readonly outputError: number;
  readonly logSumExpError: number;
}

/**
 * Attention of one query over `visible` leading keys, in float64, with the error that f32 may add; with a
 * `weightRoundoff`, tensor cores that read weights of that unit roundoff.
 */
export function attentionRow(
  query: Float64Array,
  visible: number,
  scale: number,
  key: (token: number) => Float64Array,
  value: (token: number) => Float64Array,
  weightRoundoff = 0,
): OracleRow {
  const dim = query.length;
  const count = Math.max(0, visible);
  const scores = new Float64Array(count);
  let [largest, largestMagnitude] = [-Infinity, 0];
  for (let token = 0; token < count; token++) {
    const numbers = key(token);
    let score = 0;
    let magnitude = 0;
    for (let d = 0; d < dim; d++) {
      const term = scale * (query[d] ?? NaN) * (numbers[d] ?? NaN);
      score += term;
      magnitude += Math.abs(term);
    }
    scores[token] = score;
    largest = Math.max(largest, score);
    largestMagnitude = Math.max(largestMagnitude, magnitude);
  }
  const output = new Float64Array(dim);
  let [sum, largestValue] = [0, 0];
  for (let token = 0; token < count; token++) {
    const numbers = value(token);
    const weight = Math.exp((scores[token] ?? NaN) - largest);
    sum += weight;
    for (let d = 0; d < dim; d++) {
      const number = numbers[d] ?? NaN;
      output[d] = (output[d] ?? NaN) + weight * number;
      largestValue = Math.max(largestValue, Math.abs(number));
    }
  }
  for (let d = 0; d < dim && count > 0; d++) output[d] = (output[d] ?? NaN) / sum;
  // A score is a chain of `dim` additions and a scaling. A weight carries twice that (its own and the
  // maximum's), its exponential's rounding (4) and that of rescaling (2 for each 64 keys); a sum adds one
  // rounding a key; the quotient of two sums carries twice the whole.
  const scoreError = (dim + 4) * unitRoundoff.f32 * largestMagnitude;
  // Tensor cores cut off the bits that f32 additions round, so each addition may cost twice as much.
  const additionCost = weightRoundoff > 0 ? 2 : 1;
  const sumError = additionCost * (2 * scoreError + unitRoundoff.f32 * (count * (1 + 2 / 64) + 8));
  // The largest weight is at least 1; one below the smallest normal f16 is off by at most half of the smallest
  // f16, 2^-25.
  const weightError = weightRoundoff > 0 ? weightRoundoff + count * 2 ** -25 : 0;
  const logSumExp = count > 0 ? largest + Math.log(sum) : -Infinity;
  return {
    output,
    logSumExp,
    outputError: (2 * sumError + weightError) * largestValue,
    logSumExpError: sumError + 2 * unitRoundoff.f32 * (Math.abs(logSumExp) + Math.log(Math.max(1, sum))),
  };
}
