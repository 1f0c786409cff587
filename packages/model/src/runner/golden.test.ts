import { describe, expect, it } from 'vitest';

import { readModelConfig } from '../config/read-model-config.js';
import { generateTokens } from '../generate/generate-tokens.js';
import {
  goldenModel,
  goldenModels,
  goldenPromptTokens,
  goldenRope,
  largestDifference,
  readGolden,
} from '../testing/golden.js';
import { allLogits, runBatch, withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';

/** Figures of the specification: logits of these models reach a few units. */
const tolerances = { f32: 1e-3, f16: 2e-2 } as const;
/** bf16 rounds eight times as coarsely as f16. */
const activationTolerances = { f16: tolerances.f16, bf16: 8 * tolerances.f16 } as const;

describeOnEachKind('the runner', (kind) => {
  describe.each(goldenModels)('%s against transformers', (name) => {
    it.each(['f32', 'f16'] as const)('has the same logits with a cache in %s', async (cache) => {
      const golden = await readGolden(name);
      await withRunner(
        goldenModel(name),
        { kind, rope: await goldenRope(name), cache, contextTokens: 256 },
        async (runner) => {
          for (const [row, ids] of golden.ids.entries()) {
            using sequence = runner.openSequence();
            const logits = await allLogits(runner, sequence, ids);
            expect(largestDifference(logits, golden.logits[row] ?? [])).toBeLessThan(tolerances[cache]);
          }
        },
      );
    });

    // The weights of llama2-mha are f32.
    it.skipIf(name === 'llama2-mha')('has the same logits with activations and cache in the dtype of the weights', async () => {
      const golden = await readGolden(name);
      const { declaredDType } = await readModelConfig(goldenModel(name));
      const activations = declaredDType === 'float16' ? 'f16' : 'bf16';
      await withRunner(
        goldenModel(name),
        { kind, rope: await goldenRope(name), cache: activations, activations, contextTokens: 256 },
        async (runner) => {
          for (const [row, ids] of golden.ids.entries()) {
            using sequence = runner.openSequence();
            const logits = await allLogits(runner, sequence, ids);
            const difference = largestDifference(logits, golden.logits[row] ?? []);
            expect(difference).toBeLessThan(activationTolerances[activations]);
          }
        },
      );
    });

    it('has the same logits when both rows are one batch', async () => {
      const golden = await readGolden(name);
      await withRunner(
        goldenModel(name),
        { kind, rope: await goldenRope(name), sequences: 2, contextTokens: 256 },
        async (runner) => {
          const entries = golden.ids.map((ids) => ({
            sequence: runner.openSequence(),
            ids,
            phase: 'prefill' as const,
          }));
          using batch = runner.createBatch(entries);
          await runBatch(runner, batch);
          using logits = runner.head(
            batch,
            Array.from({ length: batch.rows }, (_, row) => row),
          );
          const wanted = golden.logits.flatMap((row) => Array.from(row));
          expect(largestDifference(await logits.read(), wanted)).toBeLessThan(tolerances.f32);
        },
      );
    });

    it('has the same 32 greedy tokens', async () => {
      const { greedy } = await readGolden(name);
      const prompt = greedy.subarray(0, goldenPromptTokens);
      await withRunner(
        goldenModel(name),
        { kind, rope: await goldenRope(name), contextTokens: 128 },
        async (runner) => {
          const ids: number[] = [];
          for await (const { id } of generateTokens(runner, prompt, { maxTokens: 32, endIds: [] }))
            ids.push(id);
          expect(ids).toEqual([...greedy.subarray(goldenPromptTokens)]);
        },
      );
    });
  });
});
