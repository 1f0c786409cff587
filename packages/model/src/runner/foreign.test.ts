import { DisposedError, InvalidValueError } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import { goldenModel } from '../testing/golden.js';
import { withRunner } from '../testing/run-model.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

describe('a runner', () => {
  /** Two runners of one model, with a sequence of three tokens in each. */
  const withTwo = (use: (ours: Runner, theirs: Runner, foreign: Sequence) => Promise<void>): Promise<void> =>
    withRunner(goldenModel('mistral'), { sequences: 2, contextTokens: 64 }, async (ours, model) => {
      using theirs = model.createRunner({ sequences: 2, contextTokens: 64 });
      const own = ours.openSequence();
      const foreign = theirs.openSequence();
      (await prefill(ours, own, [1, 2, 3])).dispose();
      (await prefill(theirs, foreign, [1, 2, 3])).dispose();
      await use(ours, theirs, foreign);
      expect([own.length, foreign.length]).toEqual([3, 3]);
      expect(foreign.disposed).toBe(false);
    });
  const foreignSequence = /not this runner's.*openSequence/;

  it("refuses another runner's sequence in every call", () =>
    withTwo(async (ours, _theirs, sequence) => {
      const refused: [string, () => unknown][] = [
        ['step, recorded', () => ours.step([{ sequence, ids: [1], phase: 'decode' }])],
        ['step', () => ours.step([{ sequence, ids: [1], phase: 'prefill' }])],
        ['createBatch', () => ours.createBatch([{ sequence, ids: [1], phase: 'prefill' }])],
        ['fork', () => ours.fork(sequence)],
        ['truncate', () => { ours.truncate(sequence, 3); }],
        ['evict', () => { ours.evict(sequence); }],
        ['demand', () => ours.demand(sequence)],
        ['setBudget', () => { ours.setBudget(sequence, 64); }],
        ['checkTokens', () => { ours.checkTokens(sequence, [1]); }],
        ['prefill', () => prefill(ours, sequence, [1])],
        ['generateTokens', () => generateTokens(ours, [1], { sequence }).next()],
      ];
      for (const [call, run] of refused) {
        const error: unknown = await Promise.resolve().then(run).catch((caught: unknown) => caught);
        expect(error, call).toBeInstanceOf(InvalidValueError);
        expect((error as Error).message, call).toMatch(foreignSequence);
      }
    }));

  it("refuses another runner's batch in every call", () =>
    withTwo(async (ours, theirs, sequence) => {
      using batch = theirs.createBatch([{ sequence, ids: [1], phase: 'prefill' }]);
      const foreignBatch = /not this runner's.*createBatch/;
      expect(() => { ours.embed(batch); }).toThrow(foreignBatch);
      theirs.embed(batch);
      await expect(ours.runLayers(batch, 0, 2)).rejects.toThrow(foreignBatch);
      await expect(ours.runSegment(batch, 8)).rejects.toThrow(foreignBatch);
      await expect(ours.moveToHost(batch)).rejects.toThrow(foreignBatch);
      expect(() => ours.head(batch)).toThrow(foreignBatch);
    }));

  it('refuses what only looks like a sequence', () =>
    withTwo((ours, _theirs, foreign) => {
      for (const forged of [Object.assign({}, foreign), new Proxy(foreign, {}), undefined]) {
        expect(() => { ours.checkTokens(forged as unknown as Sequence, [1]); }).toThrow(InvalidValueError);
      }
      return Promise.resolve();
    }));

  it('says of a sequence of its own that it was disposed', () =>
    withTwo((ours) => {
      const sequence = ours.openSequence();
      sequence.dispose();
      expect(() => { ours.checkTokens(sequence, [1]); }).toThrow(DisposedError);
      return Promise.resolve();
    }));
});
