import { ropeDescription } from '@kv/sparse-core';
import { unitRoundoff } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { readModelConfig } from '../config/read-model-config.js';
import { goldenModel, goldenModels, goldenRope, largestDifference, readGolden } from '../testing/golden.js';
import { allLogits, withRunner } from '../testing/run-model.js';

// The weights of llama2-mha are f32: nothing was rounded. What docs/models.md says of the others.
it.each(goldenModels.filter((name) => name !== 'llama2-mha'))('rounded frequencies move the logits of %s', async (name) => {
  const config = await readModelConfig(goldenModel(name));
  const golden = await readGolden(name);
  const exact = ropeDescription({ ...config.rope, headDim: config.headDim });
  const rounded = await goldenRope(name);
  // An angle at position p is off by p times the frequency's error, which has no bound in p.
  const [unit, least] = config.declaredDType === 'float16' ? [unitRoundoff.f16, 2 ** -25] : [unitRoundoff.bf16, 0];
  exact.inverseFrequencies.forEach((each, pair) => {
    const error = Math.abs((rounded.inverseFrequencies[pair] ?? NaN) - each);
    expect(error).toBeLessThanOrEqual(Math.max(unit * each, least));
  });

  const differences: number[] = [];
  for (const rope of [rounded, exact]) {
    await withRunner(goldenModel(name), { rope, contextTokens: 256 }, async (runner) => {
      const each: number[] = [];
      for (const [row, ids] of golden.ids.entries()) {
        using sequence = runner.openSequence();
        each.push(largestDifference(await allLogits(runner, sequence, ids), golden.logits[row] ?? []));
      }
      differences.push(Math.max(...each));
    });
  }
  expect(differences[0]).toBeLessThan(1e-5);
  expect(differences[1]).toBeGreaterThan(5e-4);
  expect(differences[1]).toBeLessThan(0.2);
});
