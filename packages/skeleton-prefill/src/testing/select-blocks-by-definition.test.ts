import { Random } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import {
  blockScores,
  blockTokens,
  elementsAbove,
  listsAbove,
  listsOfBudget,
  skeletonMoments,
  thresholdOfEpsilon,
  thresholdOfMoments,
} from './select-blocks-by-definition.js';
import type { BlockOptions, Skeleton } from './select-blocks-by-definition.js';

const options: BlockOptions = { sinkTokens: 1, diagonalTokens: 1, tileRows: 64, slashBound: 'safe', denseRows: 0 };

function randomSkeleton(random: Random, tokens: number, rows = tokens): Skeleton {
  const normals = (length: number) => Float64Array.from({ length }, () => random.normal());
  return { slash: normals(tokens), vertical: normals(tokens), horizontal: normals(rows) };
}

/** s + v + h of a row, counted from the skeleton's first, and a key. */
function element({ slash, vertical, horizontal }: Skeleton, row: number, key: number): number {
  const position = slash.length - horizontal.length + row;
  return (slash[position - key] ?? NaN) + (vertical[key] ?? NaN) + (horizontal[row] ?? NaN);
}

describe('block scores', () => {
  it.each([64, 128])('are safe bounds of every element, and the paper\'s are none, for tiles of %i rows', (tileRows) => {
    const random = new Random(5);
    let [aboveSafe, abovePaper] = [0, 0];
    for (const [tokens, rows] of [[640, 640], [611, 200], [97, 97]] as const) {
      const skeleton = randomSkeleton(random, tokens, rows);
      const safe = blockScores(skeleton, { ...options, tileRows });
      const paper = blockScores(skeleton, { ...options, tileRows, slashBound: 'paper' });
      for (let row = 0; row < rows; row++) {
        const tile = Math.floor(row / tileRows);
        for (let key = 0; key <= tokens - rows + row; key++) {
          const block = Math.floor(key / blockTokens);
          if (!(element(skeleton, row, key) <= (safe[tile]?.[block] ?? NaN))) aboveSafe++;
          if (!(element(skeleton, row, key) <= (paper[tile]?.[block] ?? NaN))) abovePaper++;
        }
      }
    }
    expect(aboveSafe).toBe(0);
    expect(abovePaper).toBeGreaterThan(0);
  });

  it('take sinks, the diagonal and dense rows whatever the threshold, and what is NaN', () => {
    const skeleton = randomSkeleton(new Random(6), 1024, 512);
    const lists = listsAbove(blockScores(skeleton, { ...options, diagonalTokens: 100, denseRows: 1 }), Infinity);
    expect(lists[0]).toEqual([0, 6, 7, 8]);
    expect(lists.at(-1)).toHaveLength(16);
    const horizontal = Float64Array.from(skeleton.horizontal);
    horizontal[200] = NaN;
    const withNan = listsAbove(blockScores({ ...skeleton, horizontal }, options), Infinity);
    expect(withNan.map((list) => list.length)).toEqual([2, 2, 2, 12, 2, 2, 2, 2]);
  });
});

describe('thresholds', () => {
  it('keep fewer blocks as they rise', () => {
    const scores = blockScores(randomSkeleton(new Random(7), 2048), options);
    const [few, many] = [8, 7].map((threshold) => listsAbove(scores, threshold));
    few?.forEach((list, tile) => expect(many?.[tile]).toEqual(expect.arrayContaining(list)));
    expect(few?.flat().length).toBeLessThan(many?.flat().length ?? NaN);
  });

  it('of ε keep all for 0, and of a budget its share', () => {
    const scores = blockScores(randomSkeleton(new Random(8), 2048), options);
    const blocks = scores.flat().length;
    expect(listsAbove(scores, thresholdOfEpsilon(0, 2048)).flat()).toHaveLength(blocks);
    for (const budget of [0.2, 0.5, 1]) {
      expect(listsOfBudget([scores], budget).flat(2)).toHaveLength(Math.ceil(budget * blocks));
    }
  });
});

describe('the threshold of Eq. 14', () => {
  it('is right of the maxima of 64 independent elements, and of blocks takes several times their budget', () => {
    const random = new Random(11);
    const skeleton = randomSkeleton(random, 2048);
    const scores = blockScores(skeleton, { ...options, sinkTokens: 0 }).flat().filter((score) => score < Infinity);
    const { mean, deviation } = skeletonMoments(skeleton);
    const maxima = Array.from({ length: 4000 }, () => {
      return Math.max(...Array.from({ length: blockTokens }, () => mean + deviation * random.normal()));
    });
    for (const budget of [0.25, 0.125]) {
      const threshold = thresholdOfMoments(skeleton, budget);
      const shareOf = (of: readonly number[]) => of.filter((score) => score >= threshold).length / of.length;
      // Four deviations of 4000 draws.
      expect(Math.abs(shareOf(maxima) - budget)).toBeLessThan(4 * Math.sqrt((budget * (1 - budget)) / maxima.length));
      expect(shareOf(scores)).toBeGreaterThan(3 * budget);
    }
  });
});

describe('elements', () => {
  it('have the moments of all pairs', () => {
    const skeleton = randomSkeleton(new Random(9), 120);
    const all: number[] = [];
    for (let row = 0; row < 120; row++) for (let key = 0; key <= row; key++) all.push(element(skeleton, row, key));
    const mean = all.reduce((sum, x) => sum + x, 0) / all.length;
    const variance = all.reduce((sum, x) => sum + (x - mean) ** 2, 0) / all.length;
    const moments = skeletonMoments(skeleton);
    expect(moments.mean).toBeCloseTo(mean, 10);
    expect(moments.deviation).toBeCloseTo(Math.sqrt(variance), 10);
  });

  it('above a threshold are the same for the quadratic builder and for Algorithm 2', () => {
    const random = new Random(10);
    for (const threshold of [-20, 0, 3, 6]) {
      const skeleton = randomSkeleton(random, 90);
      const wanted = new Set<number>();
      for (let row = 0; row < 90; row++) {
        for (let key = 0; key <= row; key++) if (!(element(skeleton, row, key) < threshold)) wanted.add(row * 90 + key);
      }
      expect([...elementsAbove(skeleton, threshold)].sort((a, b) => a - b)).toEqual([...wanted].sort((a, b) => a - b));
    }
  });
});
