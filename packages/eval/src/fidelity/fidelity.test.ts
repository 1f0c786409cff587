import { InvalidValueError, ShapeError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';
import fc from 'fast-check';

import { attentionOutput, attentionWeights } from './attention.js';
import { indexCoverage, indexEntropy, indexGini, largestGap } from './index-spread.js';
import { capturedMass, klDivergence, massEfficiency, topRecall } from './mass.js';
import { percentile } from './numbers.js';
import { centredError, centredLogitError, cosineSimilarity, relativeError } from './output-error.js';
import { selectionFidelity } from './selection-fidelity.js';

const weights = [0.1, 0.4, 0.05, 0.4, 0.05];

/** Two tokens whose scores differ by ln 3 for the query (1, 0): weights 3/4 and 1/4. */
const two = { keys: new Float32Array([Math.log(3), 5, 0, -5]), values: new Float32Array([4, 0, 0, 8]), headDim: 2 };
const query = new Float32Array([1, 0]);
/** The keys are f32: the logarithm is off by 2^-25, and so are the weights. */
const digits = 6;

const cacheOf = fc.integer({ min: 2, max: 20 }).chain((tokens) => {
  const rows = (count: number): fc.Arbitrary<Float32Array> =>
    fc.array(fc.integer({ min: -40, max: 40 }), { minLength: count, maxLength: count }).map((numbers) =>
      Float32Array.from(numbers, (number) => number / 10),
    );
  return fc.record({
    cache: fc.record({ keys: rows(3 * tokens), values: rows(3 * tokens), headDim: fc.constant(3) }),
    heldOutQueries: fc.array(rows(3), { minLength: 1, maxLength: 4 }),
    kept: fc.subarray([...Array(tokens).keys()], { minLength: 1 }),
    scale: fc.constantFrom(0.25, 1),
  });
});

describe('attention in f64', () => {
  it('weighs keys by the softmax of their scores, and values by their weights', () => {
    const weighed = attentionWeights(query, two, 1);
    expect(weighed[0]).toBeCloseTo(0.75, digits);
    expect(weighed[1]).toBeCloseTo(0.25, digits);
    const output = attentionOutput(weighed, two);
    expect(output[0]).toBeCloseTo(3, digits);
    expect(output[1]).toBeCloseTo(2, digits);
    expect([...attentionOutput(weighed, two, [1])]).toEqual([0, 8]);
  });

  it('does not overflow for scores in the thousands', () => {
    const cache = { ...two, keys: new Float32Array([3000, 0, 2999, 0]) };
    expect(attentionWeights(query, cache, 1)[1]).toBeCloseTo(1 / (1 + Math.E), 12);
  });

  it('refuses rows that do not fit', () => {
    expect(() => attentionWeights(query, { ...two, keys: new Float32Array(5) }, 1)).toThrow(ShapeError);
    expect(() => attentionWeights(new Float32Array(3), two, 1)).toThrow(ShapeError);
  });
});

describe('mass', () => {
  it('is what the kept tokens hold, of what the best as many would', () => {
    expect(capturedMass(weights, [0, 1])).toBeCloseTo(0.5, 15);
    expect(massEfficiency(weights, [0, 1])).toBeCloseTo(0.5 / 0.8, 15);
    expect(massEfficiency(weights, [1, 3])).toBe(1);
  });

  it('recalls the greatest, the first of equal ones', () => {
    expect(topRecall(weights, [1], 2)).toBe(0.5);
    expect(topRecall(weights, [1], 1)).toBe(1);
    expect(topRecall(weights, [3], 1)).toBe(0);
    expect(topRecall(weights, [0, 2, 4], 5)).toBe(0.6);
  });

  it('diverges as much as approximate weights are off', () => {
    expect(klDivergence([0.5, 0.5], [0.5, 0.5])).toBe(0);
    expect(klDivergence([1, 0], [0.5, 0.5])).toBeCloseTo(Math.LN2, 15);
    expect(klDivergence([0.5, 0.5], [1, 0])).toBe(Infinity);
  });
});

describe('errors of outputs and logits', () => {
  it('tell length, direction and mean apart', () => {
    expect(relativeError([3, 4], [3, 4])).toBe(0);
    expect(relativeError([6, 8], [3, 4])).toBe(1);
    expect(cosineSimilarity([6, 8], [3, 4])).toBeCloseTo(1, 15);
    expect(cosineSimilarity([-4, 3], [3, 4])).toBe(0);
    expect(centredError([3, 5], [3, 4], [3, 3])).toBe(1);
    expect(centredLogitError([11, 12, 13], [1, 2, 3])).toBe(0);
    expect(centredLogitError([2, 0], [0, 0])).toBe(1);
  });
});

describe('the spread of kept positions', () => {
  it('is even over all bins, or in one', () => {
    const all = [...Array(128).keys()];
    expect(indexEntropy(all, 128)).toBeCloseTo(1, 12);
    expect(indexGini(all, 128)).toBeCloseTo(0, 12);
    expect(indexCoverage(all, 128)).toBe(1);
    expect(indexEntropy([0, 1], 128)).toBeCloseTo(0, 12);
    expect(indexGini([0, 1], 128)).toBeCloseTo(63 / 64, 12);
    expect(indexCoverage([0, 1, 127], 128)).toBe(2 / 64);
  });

  it('of two of four bins is half of what is possible', () => {
    expect(indexEntropy([0, 1, 2, 3], 8, 4)).toBeCloseTo(0.5, 15);
  });

  it('has gaps before, between and behind the kept', () => {
    expect(largestGap([0, 1, 5, 9], 10)).toBe(0.3);
    expect(largestGap([4], 10)).toBe(0.5);
    expect(largestGap([5], 10)).toBe(0.5);
    expect(largestGap([], 10)).toBe(1);
  });
});

describe('selectionFidelity', () => {
  it('of everything is perfect', () => {
    const kept = [0, 1];
    expect(selectionFidelity({ cache: two, heldOutQueries: [query], kept, scale: 1 })).toEqual({
      capturedMass: expect.closeTo(1, 12) as number,
      massEfficiency: 1,
      topRecall: 1,
      outputError: { mean: 0, percentile95: 0, greatest: 0 },
      largestGap: 0,
    });
  });

  it('of a part agrees with the parts worked out by hand', () => {
    const found = selectionFidelity({ cache: two, heldOutQueries: [query], kept: [1], scale: 1, topTokens: 1 });
    expect(found.capturedMass).toBeCloseTo(0.25, digits);
    expect(found.massEfficiency).toBeCloseTo(1 / 3, digits);
    expect(found.topRecall).toBe(0);
    expect(found.outputError.mean).toBeCloseTo(Math.hypot(3, 6) / Math.hypot(3, 2), 5);
    expect(found.largestGap).toBe(0.5);
  });

  it('keeps within its bounds, and the output error within that of the mass', () => {
    fc.assert(
      fc.property(cacheOf, (trial) => {
        const { capturedMass: mass, massEfficiency: efficiency, topRecall: recall } = selectionFidelity(trial);
        for (const share of [mass, efficiency, recall]) {
          expect(share).toBeGreaterThanOrEqual(0);
          // Sums of f64 that are one on paper.
          expect(share).toBeLessThanOrEqual(1 + 1e-12);
        }
        for (const each of trial.heldOutQueries) {
          const weighed = attentionWeights(each, trial.cache, trial.scale);
          const [whole, part] = [attentionOutput(weighed, trial.cache), attentionOutput(weighed, trial.cache, trial.kept)];
          const distance = Math.hypot(...whole.map((value, dim) => value - (part[dim] ?? NaN)));
          // ‖y − ỹ‖ ≤ (1 − m) · the greatest distance of two values, which are within ±4 in three dimensions.
          expect(distance).toBeLessThanOrEqual((1 - capturedMass(weighed, trial.kept)) * 8 * Math.sqrt(3) + 1e-9);
        }
      }),
    );
  });

  it('refuses what it cannot measure', () => {
    const trial = { cache: two, heldOutQueries: [query], kept: [0], scale: 1 };
    for (const kept of [[], [1, 0], [0, 0], [2], [-1], [0.5]]) {
      expect(() => selectionFidelity({ ...trial, kept })).toThrow(InvalidValueError);
    }
    expect(() => selectionFidelity({ ...trial, heldOutQueries: [] })).toThrow(InvalidValueError);
  });
});

it('percentile is the smallest number that the share does not exceed', () => {
  const numbers = [5, 1, 4, 2, 3];
  expect([0, 0.2, 0.21, 0.95, 1].map((share) => percentile(numbers, share))).toEqual([1, 1, 2, 5, 5]);
});
