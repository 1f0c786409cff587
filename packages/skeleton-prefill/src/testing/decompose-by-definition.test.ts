import { ropeDescription } from '@kv/sparse-core';
import type { RopeConvention } from '@kv/sparse-core';
import { Random } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { decomposeByDefinition, logAttention } from './decompose-by-definition.js';
import type { DecompositionOptions } from './decompose-by-definition.js';
import { interiorArea, interiorSamples } from './interior-samples.js';
import { solveRidge, squareMatrix } from './ridge.js';
import { meanRelativeAngles, relativeAngles, rotate, unrotate } from './rotations.js';
import { syntheticAttention } from './synthetic-attention.js';
import { add, dot } from './vectors.js';

const conventions: readonly RopeConvention[] = ['halfSplit', 'interleaved'];
const options: DecompositionOptions = {
  sinkTokens: 4,
  diagonalTokens: 16,
  samples: 3000,
  seed: 1,
  ridge: 1e-6,
  formulas: 'corrected',
};

function synthetic(convention: RopeConvention, tokens = 400) {
  const random = new Random(7);
  const description = ropeDescription({ theta: 1e4, headDim: 32, rotaryDim: 16, convention });
  return syntheticAttention(random, { ...description, attentionScale: 1.2 }, { tokens, dim: 32, sinkTokens: 4 });
}

describe('rotations', () => {
  it.each(conventions)('are undone, %s', (convention) => {
    const random = new Random(3);
    const rope = { ...ropeDescription({ theta: 1e4, headDim: 16, rotaryDim: 12, convention }), attentionScale: 1.3 };
    const row = Float64Array.from({ length: 16 }, () => random.normal());
    // Two rotations by the same angle, a few roundings of float64 each.
    unrotate(rope, rotate(rope, row, 123_456), 123_456).forEach((x, index) => expect(x).toBeCloseTo(row[index] ?? NaN, 12));
  });

  it('have the means that sums of up to a million lags have', () => {
    const rope = ropeDescription({ theta: 5e5, headDim: 8 });
    for (const [first, last] of [[16, 16], [16, 900], [100, 999_999]] as const) {
      const sum = new Float64Array(8);
      for (let lag = first; lag <= last; lag++) add(sum, relativeAngles(rope, lag));
      const mean = meanRelativeAngles(rope, first, last);
      // A sum of n terms of 1 is right to n² 2⁻⁵³ at worst, its mean to n 2⁻⁵³; an angle of 10⁶ to 10⁶ 2⁻⁵³.
      sum.forEach((x, index) => expect(Math.abs(x / (last - first + 1) - (mean[index] ?? NaN))).toBeLessThan(3e-10));
    }
  });
});

describe('the ridge solution', () => {
  /** The ridge solution from the singular vectors of A, by one-sided Jacobi rotations of its columns. */
  function bySingularValues(rows: readonly Float64Array[], right: ArrayLike<number>, ridge: number): Float64Array {
    const size = rows[0]?.length ?? 0;
    const columns = Array.from({ length: size }, (_, c) => Float64Array.from(rows, (row) => row[c] ?? NaN));
    const turns = squareMatrix(size);
    turns.forEach((row, index) => (row[index] = 1));
    const turn = (a: Float64Array, b: Float64Array, cosine: number, sine: number) => {
      const before = Float64Array.from(a);
      a.forEach((x, index) => (a[index] = cosine * x - sine * (b[index] ?? NaN)));
      b.forEach((x, index) => (b[index] = cosine * x + sine * (before[index] ?? NaN)));
    };
    for (let sweep = 0; sweep < 30; sweep++) {
      columns.forEach((a, p) => {
        for (let q = p + 1; q < size; q++) {
          const [b, u, v] = [columns[q], turns[p], turns[q]];
          if (!b || !u || !v || dot(a, b) === 0) continue;
          const slope = (dot(b, b) - dot(a, a)) / (2 * dot(a, b));
          const t = (slope < 0 ? -1 : 1) / (Math.abs(slope) + Math.hypot(1, slope));
          const cosine = 1 / Math.hypot(1, t);
          turn(a, b, cosine, cosine * t);
          turn(u, v, cosine, cosine * t);
        }
      });
    }
    const squares = columns.map((column) => dot(column, column));
    const lambda = (ridge ** 2 * squares.reduce((sum, x) => sum + x, 0)) / 4;
    const solution = new Float64Array(size);
    columns.forEach((column, index) => {
      add(solution, turns[index] ?? [], dot(column, right) / ((squares[index] ?? NaN) + lambda));
    });
    return solution;
  }

  it('is that of an SVD, of a matrix without full rank too', () => {
    const random = new Random(11);
    const rows = Array.from({ length: 60 }, () => {
      const row = Float64Array.from({ length: 9 }, () => random.normal());
      row[8] = (row[0] ?? NaN) + (row[1] ?? NaN);
      return row;
    });
    const right = rows.map(() => random.normal());
    const gram = squareMatrix(9);
    const projected = new Float64Array(9);
    rows.forEach((row, sample) => {
      gram.forEach((line, index) => add(line, row, row[index]));
      add(projected, row, right[sample]);
    });
    const wanted = bySingularValues(rows, right, 1e-3);
    // λ² is 2.5e-7 of the trace, so that normal equations are right to about 2⁻⁵³ / 2.5e-7 of the solution.
    solveRidge(gram, projected, 1e-3).forEach((x, index) => expect(Math.abs(x - (wanted[index] ?? NaN))).toBeLessThan(1e-8));
  });

  it('is NaN where the matrix is', () => {
    expect(solveRidge([Float64Array.of(NaN)], [1], 1e-3)).toEqual(Float64Array.of(NaN));
  });
});

describe('samples of the interior', () => {
  it('lie in it, and steps of a prompt share it out', () => {
    const rows = { ...options, samples: 500, behindOthers: false };
    for (const [first, end] of [[0, 300], [0, 21], [100, 300], [299, 300]] as const) {
      const samples = interiorSamples({ ...rows, first, end });
      const { own, all } = interiorArea({ ...rows, first, end });
      expect(samples).toHaveLength(Math.ceil((500 * own) / all));
      for (const { row, key } of samples) {
        expect(row).toBeGreaterThanOrEqual(first);
        expect(row).toBeLessThan(end);
        expect(key).toBeGreaterThanOrEqual(4);
        expect(key).toBeLessThanOrEqual(row - 16);
      }
    }
    expect(interiorSamples({ ...rows, first: 0, end: 20 })).toEqual([]);
  });

  it('leave sums over all elements as certain in several steps as in one', () => {
    const samples = 40_000;
    for (const steps of [[3000], [100, 3000], [2000, 2200, 3000], Array.from({ length: 10 }, (_, step) => 300 * (step + 1))]) {
      let variance = 0;
      steps.forEach((end, step) => {
        const rows = { ...options, samples, first: steps[step - 1] ?? 0, end, behindOthers: step > 0 };
        const { own, all } = interiorArea(rows);
        variance += own ** 2 / interiorSamples(rows).length;
        expect(Math.abs((variance * samples) / all ** 2 - 1), `${steps.length} steps, to ${end}`).toBeLessThan(1e-3);
      });
    }
  });
});

describe('the decomposition', () => {
  // What a ridge of 1e-6 takes off the angles that hardly turn, whose columns of A are its smallest: here about 1e-5.
  const biasOfRidge = 3e-5;
  /** The largest |s + v + h − ln A| of the interior of some rows, with a row's true denominator or the estimate. */
  function worst(convention: RopeConvention, changes: Partial<DecompositionOptions> = {}, steps = [400]) {
    const problem = synthetic(convention);
    const all = { ...options, ...changes };
    const { slash, vertical, horizontal, exactHorizontal } = decomposeByDefinition(problem, steps, all);
    const error = (row: number, h: number | undefined) => {
      const wanted = logAttention(problem, row).slice(all.sinkTokens, row - all.diagonalTokens + 1);
      return wanted.reduce((most, x, index) => {
        const key = all.sinkTokens + index;
        return Math.max(most, Math.abs((slash[row - key] ?? NaN) + (vertical[key] ?? NaN) + (h ?? NaN) - x));
      }, 0);
    };
    const first = 400 - horizontal.length;
    const rows = Array.from({ length: 20 }, (_, index) => first + 28 + Math.floor((index * (371 - first)) / 19));
    return {
      exact: Math.max(...rows.map((row) => error(row, exactHorizontal[row - first]))),
      last: error(399, horizontal.at(-1)),
    };
  }

  it.each(conventions)('is that of a synthetic attention map, %s', (convention) => {
    const { exact, last } = worst(convention);
    expect(exact).toBeLessThan(biasOfRidge);
    expect(last).toBeLessThan(biasOfRidge);
  });

  it('of a prompt in steps is so too', () => {
    const { exact, last } = worst('halfSplit', {}, [64, 128, 300, 400]);
    expect(exact).toBeLessThan(biasOfRidge);
    expect(last).toBeLessThan(biasOfRidge);
  });

  it('as the paper prints it is not', () => {
    const { exact, last } = worst('halfSplit', { formulas: 'paper' });
    expect(exact).toBeGreaterThan(0.1);
    expect(last).toBeGreaterThan(0.1);
  });

  it('has zeros and exact rows where a prompt has no interior', () => {
    const problem = synthetic('halfSplit', 20);
    const { slash, horizontal, exactHorizontal } = decomposeByDefinition(problem, [20], options);
    expect(slash.every((x) => x === 0)).toBe(true);
    expect(horizontal).toEqual(exactHorizontal);
  });
});
