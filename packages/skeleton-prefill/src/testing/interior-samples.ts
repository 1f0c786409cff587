import { uniform } from '@kv/sparse-core/testing';

/** An element of the interior: query row `row` and key `key`. */
export interface InteriorSample {
  readonly row: number;
  readonly key: number;
}

export interface SampledRows {
  /** The rows of a step: from `first` to `end - 1`. */
  readonly first: number;
  readonly end: number;
  readonly sinkTokens: number;
  readonly diagonalTokens: number;
  /** As many as the rows before `end` have if they come in one step. */
  readonly samples: number;
  /** Whether steps before have been sampled. */
  readonly behindOthers: boolean;
  readonly seed: number;
}

/** Elements in the rows before row `count` of a triangle whose row r has r + 1. */
const triangle = (count: number) => (count * (count + 1)) / 2;

/** How many elements the interior has in the rows from `first` on, and in all. */
export function interiorArea({ first, end, sinkTokens, diagonalTokens }: SampledRows): { own: number; all: number } {
  const all = triangle(Math.max(0, end - sinkTokens - diagonalTokens));
  return { own: all - triangle(Math.max(0, first - sinkTokens - diagonalTokens)), all };
}

/**
 * Algorithm 1, line 1, for the rows of a step: one sample from each of as many equal runs of the interior's elements, taken
 * row by row. A first step draws its share of the samples. Any other one draws as many as leave the variance of sums over all
 * elements, which is a sum of elements² / samples over the steps, what it is in one step.
 */
export function interiorSamples(rows: SampledRows): InteriorSample[] {
  const { own, all } = interiorArea(rows);
  if (own === 0) return [];
  const before = rows.behindOthers ? all - own : 0;
  const count = Math.ceil((rows.samples * own) / (all + before));
  const width = own / count;
  return Array.from({ length: count }, (_, sample) => {
    const start = Math.floor(sample * width);
    const end = Math.floor((sample + 1) * width);
    const within = Math.floor(uniform(rows.seed, rows.first * 2 ** 24 + sample) * Math.max(1, end - start));
    const element = all - own + Math.min(own - 1, start + within);
    let row = Math.floor((Math.sqrt(8 * element + 1) - 1) / 2);
    while (triangle(row) > element) row--;
    while (triangle(row + 1) <= element) row++;
    return { row: row + rows.sinkTokens + rows.diagonalTokens, key: element - triangle(row) + rows.sinkTokens };
  });
}
