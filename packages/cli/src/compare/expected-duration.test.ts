import { Model } from '@kv/model';
import { createDevice } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { needleModel } from '../testing/run-kv.js';
import { expectReading, extrapolate } from './expected-duration.js';

describe('extrapolate', () => {
  /** Samples of a model whose token costs `fixed` and, for each token before it, `growth`. */
  const samples = (fixed: number, growth: number) =>
    [128, 384, 640, 896].map((position) => ({ position, secondsPerToken: fixed + growth * position }));

  it('carries on what grows with the position', () => {
    // The sum over all positions: 10,000 × 1e-3 + 1e-6 × 10,000² / 2.
    expect(extrapolate(samples(1e-3, 1e-6), 10_000)).toBeCloseTo(60, 6);
    expect(extrapolate(samples(1e-3, 0), 10_000)).toBeCloseTo(10, 6);
  });

  it('takes noise for no gain, and one sample for all', () => {
    expect(extrapolate(samples(1e-3, -1e-6), 10_000)).toBeCloseTo(10_000 * (1e-3 - 512e-6), 6);
    expect(extrapolate(samples(1e-3, 0).slice(0, 1), 50)).toBeCloseTo(0.05, 9);
  });
});

describe('expectReading', () => {
  it.each([2, 300, 5000])('measures on the beginning of %d tokens', async (tokens) => {
    using model = await Model.open(needleModel, { device: createDevice({ threads: 2 }) });
    const document = Int32Array.from({ length: tokens }, (_, index) => 3 + ((index * 7919) % 4000));
    const seconds = await expectReading(model, document, new AbortController().signal);
    expect(seconds).toBeGreaterThan(0);
    expect(seconds).toBeLessThan(600);
  });
});
