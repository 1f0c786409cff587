import type { RopeDescription } from '@kv/sparse-core';

import { interiorArea, interiorSamples } from './interior-samples.js';
import { solveRidge, squareMatrix } from './ridge.js';
import { meanRelativeAngles, relativeAngles, unrotate } from './rotations.js';
import { add, dot, logSumExp, minus, runningSums } from './vectors.js';

/** One query head over the keys of its kv head. */
export interface AttentionProblem {
  /** `[token][dim]`, after RoPE; of a later turn the earlier rows may be absent. */
  readonly queries: readonly Float64Array[];
  readonly keys: readonly Float64Array[];
  readonly rope: RopeDescription;
  readonly scale: number;
}

export interface DecompositionOptions {
  readonly sinkTokens: number;
  readonly diagonalTokens: number;
  readonly samples: number;
  readonly seed: number;
  readonly ridge: number;
  readonly formulas: 'corrected' | 'paper';
  /** Steps that are not sampled, by their number. Default: none. */
  readonly skipped?: readonly number[] | undefined;
}

export interface Decomposition {
  /** `[lag]`, of a key that many tokens before its query. */
  readonly slash: Float64Array;
  /** `[key]` */
  readonly vertical: Float64Array;
  /** `[row]` of the last step. */
  readonly horizontal: Float64Array;
  /** The same with each row's true logarithm of the softmax's denominator. */
  readonly exactHorizontal: Float64Array;
}

/** `q_i · k_j / √d` */
function logit({ queries, keys, scale }: AttentionProblem, row: number, key: number): number {
  return scale * dot(queries[row] ?? [], keys[key] ?? []);
}

/** ln A of the paper, of the keys up to the row's own. */
export function logAttention(problem: AttentionProblem, row: number): number[] {
  const logits = Array.from({ length: row + 1 }, (_, key) => logit(problem, row, key));
  const denominator = logSumExp(logits);
  return logits.map((x) => x - denominator);
}

/**
 * Algorithm 1 in plain steps: slow and obviously right. `corrected` is as docs/methods/skeleton-prefill.md says, `paper`
 * keeps the letter of lines 3, 4, 16 and 18.
 * @param steps where the prompt's steps end, the last one at its end
 */
export function decomposeByDefinition(
  problem: AttentionProblem,
  steps: readonly number[],
  options: DecompositionOptions,
): Decomposition {
  const { keys, rope } = problem;
  const { sinkTokens, diagonalTokens, formulas } = options;
  const tokens = steps.at(-1) ?? 0;
  const plain = keys.slice(0, tokens).map((key, position) => unrotate(rope, key, position));
  const dim = plain[0]?.length ?? 0;
  const sumsOf = (vectors: readonly Float64Array[]) => {
    const sums = [new Float64Array(dim)];
    for (const vector of vectors) {
      const next = Float64Array.from(sums.at(-1) ?? []);
      add(next, vector);
      sums.push(next);
    }
    return sums;
  };
  const [keySums, plainSums] = [sumsOf(keys.slice(0, tokens)), sumsOf(plain)];
  const meanOf = (sums: readonly Float64Array[], first: number, end: number) =>
    minus(sums[end] ?? [], sums[first] ?? []).map((x) => x / (end - first));

  // The interior of a row: keys from sinkTokens on, before `end`.
  const interiorEnd = (row: number) => row + 1 - diagonalTokens;
  const interiorCount = (row: number) => Math.max(0, interiorEnd(row) - sinkTokens);
  const statisticsOf = (row: number): { first: number; end: number } => {
    const whole = formulas === 'paper' || interiorCount(row) === 0;
    return whole ? { first: 0, end: row + 1 } : { first: sinkTokens, end: interiorEnd(row) };
  };
  const meanLogit = (row: number) => {
    const { first, end } = statisticsOf(row);
    return problem.scale * dot(problem.queries[row] ?? [], meanOf(keySums, first, end));
  };
  const meanAngles = (row: number) => meanRelativeAngles(rope, diagonalTokens, row - sinkTokens);
  const meanPlain = (row: number) => meanOf(plainSums, sinkTokens, interiorEnd(row));

  const angles = 2 * rope.inverseFrequencies.length;
  const gram = squareMatrix(angles + dim);
  const right = new Float64Array(angles + dim);
  steps.forEach((end, step) => {
    if (options.skipped?.includes(step)) return;
    const behindOthers = steps.slice(0, step).some((_, earlier) => !options.skipped?.includes(earlier));
    const rows = { ...options, first: steps[step - 1] ?? 0, end, behindOthers };
    const samples = interiorSamples(rows);
    const weight = interiorArea(rows).own / samples.length;
    for (const { row, key } of samples) {
      const regressors = new Float64Array(angles + dim);
      regressors.set(minus(relativeAngles(rope, row - key), meanAngles(row)));
      regressors.set(minus(plain[key] ?? [], meanPlain(row)), angles);
      gram.forEach((line, index) => add(line, regressors, weight * (regressors[index] ?? NaN)));
      add(right, regressors, weight * (logit(problem, row, key) - meanLogit(row)));
    }
  });

  const last = tokens - 1;
  const firstRow = steps.at(-2) ?? 0;
  const slash = new Float64Array(tokens);
  const vertical = new Float64Array(tokens);
  if (interiorCount(last) > 0) {
    const solution = solveRidge(gram, right, options.ridge);
    const [alpha, kappa] = [solution.subarray(0, angles), solution.subarray(angles)];
    for (let token = 0; token < tokens; token++) {
      slash[token] = dot(minus(relativeAngles(rope, token), meanAngles(last)), alpha);
      vertical[token] = dot(minus(plain[token] ?? [], meanPlain(last)), kappa);
    }
  }

  const [slashSums, verticalSums] = [runningSums(slash), runningSums(vertical)];
  const sumOf = (sums: Float64Array, first: number, end: number) => (sums[end] ?? NaN) - (sums[first] ?? NaN);
  const drift = (row: number) => {
    const count = interiorCount(row);
    if (count === 0) return 0;
    if (formulas === 'paper') return sumOf(slashSums, Math.max(0, sinkTokens - 1), interiorEnd(row)) / count;
    const ofSlash = sumOf(slashSums, diagonalTokens, row - sinkTokens + 1);
    return (ofSlash + sumOf(verticalSums, sinkTokens, interiorEnd(row))) / count;
  };
  const centred = (row: number, first: number, end: number) => {
    const mean = meanLogit(row);
    return Array.from({ length: Math.max(0, end - first) }, (_, index) => logit(problem, row, first + index) - mean);
  };
  const variance = (row: number) => {
    const { first, end } = statisticsOf(row);
    return centred(row, first, end).reduce((sum, x) => sum + x * x, 0) / (end - first);
  };
  const shape = (row: number) => {
    if (interiorCount(row) === 0) return centred(row, 0, row + 1);
    return [...centred(row, 0, sinkTokens), ...centred(row, interiorEnd(row), row + 1)];
  };
  const correction = () => {
    const ofRow = logSumExp(centred(last, sinkTokens, interiorEnd(last)));
    return variance(last) / 2 - ofRow + (formulas === 'paper' ? 0 : Math.log(interiorCount(last)));
  };
  const zeta = interiorCount(last) > 0 ? correction() : 0;
  const rows = Array.from({ length: tokens - firstRow }, (_, index) => firstRow + index);
  return {
    slash,
    vertical,
    horizontal: Float64Array.from(rows, (row) => {
      const count = interiorCount(row);
      const ofInterior = count > 0 ? Math.log(count) + variance(row) / 2 - zeta : -Infinity;
      return -drift(row) - logSumExp([...shape(row), ofInterior]);
    }),
    exactHorizontal: Float64Array.from(rows, (row) => -drift(row) - logSumExp(centred(row, 0, row + 1))),
  };
}
