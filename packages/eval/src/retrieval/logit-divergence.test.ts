import { describe, expect, it } from 'vitest';

import { logitDivergence } from './logit-divergence.js';

describe('logitDivergence', () => {
  it('is that of the distributions, whatever is added to all logits', () => {
    // Softmax of logarithms: (1/2, 1/4, 1/4) and (1/4, 1/4, 1/2).
    const reference = Float32Array.of(Math.log(2), 0, 0);
    const given = Float32Array.of(100, 100, 100 + Math.log(2));
    // 1/2 ln 2 + 0 - 1/4 ln 2; the logits are rounded to f32.
    expect(Math.abs(logitDivergence(reference, given) - Math.log(2) / 4)).toBeLessThan(100 * 2 ** -24);
    expect(logitDivergence(given, given)).toBe(0);
  });

  it('is finite where a probability is too small for a number', () => {
    const far = logitDivergence(Float32Array.of(0, -1000), Float32Array.of(-1000, 0));
    expect(far).toBe(1000);
  });
});
