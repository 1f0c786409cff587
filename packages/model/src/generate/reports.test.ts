import { setImmediate } from 'node:timers/promises';

import { densePrefill, kvPolicy } from '@kv/sparse-core';
import type { PrefillAttention, PrefillReport } from '@kv/sparse-core';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';

import type { Runner } from '../runner/runner.js';
import { goldenModel } from '../testing/golden.js';
import { withRunner } from '../testing/run-model.js';
import { prefill } from './prefill.js';

const prompt = Int32Array.from({ length: 20 }, (_, token) => token);
const chunkTokens = 8;

/** Dense attention whose reports are the caller's. */
function reporting(report: (call: number) => PrefillReport | Promise<PrefillReport>): PrefillAttention {
  const dense = densePrefill();
  let call = 0;
  return {
    name: 'reporting',
    attend(stream, given) {
      dense.attend(stream, given);
      return { report: report(call++) };
    },
  };
}

const withReports = (
  report: Parameters<typeof reporting>[0],
  use: (runner: Runner) => Promise<void>,
): Promise<void> =>
  withRunner(goldenModel('mistral'), { contextTokens: 64, policy: kvPolicy({ prefill: reporting(report) }) }, use);

describe('reports of a prefill attention', () => {
  const unhandled: unknown[] = [];
  const note = (reason: unknown): void => {
    unhandled.push(reason);
  };

  beforeEach(() => {
    unhandled.length = 0;
    process.on('unhandledRejection', note);
  });

  afterEach(async () => {
    await setImmediate();
    process.off('unhandledRejection', note);
    expect(unhandled).toEqual([]);
  });

  it('come as their mean over layers and chunks, those that are late too', async () => {
    const late: (() => void)[] = [];
    const reports: PrefillReport[] = [];
    const given = (call: number): PrefillReport => ({
      density: call % 2 === 0 ? 0.25 : 0.75,
      errorBound: call === 0 ? 3 : undefined,
      fallback: call % 2 === 0 ? undefined : call < 2 ? 'short' : 'flat',
    });
    const report = (call: number): PrefillReport | Promise<PrefillReport> =>
      call === 0 ? given(0) : new Promise((resolve) => late.push(() => { resolve(given(call)); }));
    await withReports(report, async (runner) => {
      const onReport = (mean: PrefillReport): void => void reports.push(mean);
      (await prefill(runner, runner.openSequence(), prompt, { chunkTokens, onReport })).dispose();
      expect(late).toHaveLength(3 * runner.model.config.layers - 1);
      expect(reports).toEqual([]);
      for (const arrive of late) arrive();
      await setImmediate();
      const wanted = { density: 0.5, estimatedMass: undefined, errorBound: 3, fallback: 'short; flat' };
      expect(reports).toEqual([wanted]);
    });
  });

  it('count by the scores of their chunk', async () => {
    const reports: PrefillReport[] = [];
    await withReports((call) => ({ density: call < 2 ? 1 : 0.5 }), async (runner) => {
      expect(runner.model.config.layers).toBe(2);
      const onReport = (mean: PrefillReport): void => void reports.push(mean);
      (await prefill(runner, runner.openSequence(), prompt, { chunkTokens, onReport })).dispose();
      await setImmediate();
      const [ofAll, ofFirstChunk] = [(20 * 21) / 2, (8 * 9) / 2];
      expect(reports[0]?.density).toBeCloseTo(0.5 + 0.5 * (ofFirstChunk / ofAll), 12);
    });
  });

  it('are kept by the batch whose layers ran', async () => {
    const pending = new Promise<PrefillReport>(() => undefined);
    await withReports((call) => (call === 0 ? { density: 0.5 } : pending), async (runner) => {
      using batch = runner.createBatch([{ sequence: runner.openSequence(), ids: [1, 2], phase: 'prefill-end' }]);
      runner.embed(batch);
      await runner.runLayers(batch, 0, runner.model.config.layers);
      expect(batch.reports[0]).toEqual({ density: 0.5 });
      expect(batch.reports[1]).toBe(pending);
      expect(batch.reports).toHaveLength(runner.model.config.layers);
    });
  });

  it('that fail or never arrive hold nothing up', async () => {
    for (const report of [
      () => Promise.reject<PrefillReport>(new Error('no report, on purpose')),
      () => new Promise<PrefillReport>(() => undefined),
    ]) {
      let calls = 0;
      await withReports(report, async (runner) => {
        const sequence = runner.openSequence();
        const onReport = (): void => void (calls += 1);
        (await prefill(runner, sequence, prompt, { chunkTokens, onReport })).dispose();
        expect(sequence.failure).toBeUndefined();
        (await runner.step([{ sequence, ids: [1], phase: 'decode' }])).dispose();
        await runner.stream.synchronize();
        expect(sequence.length).toBe(prompt.length + 1);
      });
      await setImmediate();
      expect(calls).toBe(0);
    }
  });

  const failing: [string, () => unknown][] = [
    ['throws', () => { throw new Error('no use for it'); }],
    ['rejects', () => Promise.reject(new Error('no use for it'))],
  ];
  it.each(failing)('end the sequence where who gets them %s, at once or late', async (_name, onReport) => {
    for (const isLate of [false, true]) {
      let arrive = (): void => undefined;
      const report = (call: number): PrefillReport | Promise<PrefillReport> =>
        isLate && call === 0 ? new Promise((resolve) => { arrive = () => { resolve({ density: 1 }); }; }) : { density: 1 };
      await withReports(report, async (runner) => {
        const sequence = runner.openSequence();
        (await prefill(runner, sequence, prompt, { chunkTokens, onReport })).dispose();
        arrive();
        await setImmediate();
        expect(sequence.failure?.message).toBe('no use for it');
        await expect(runner.step([{ sequence, ids: [1], phase: 'decode' }])).rejects.toThrow(/ended by an error \(no use for it/);
        (await prefill(runner, runner.openSequence(), prompt)).dispose();
      });
    }
  });

  it('that arrive or fail after an abort reach nobody', async () => {
    const settle: (() => void)[] = [];
    const report = (call: number): Promise<PrefillReport> =>
      new Promise((resolve, reject) => {
        settle.push(() => {
          if (call % 2 === 0) resolve({ density: 1 });
          else reject(new Error('aborted, on purpose'));
        });
      });
    let calls = 0;
    await withReports(report, async (runner) => {
      const sequence = runner.openSequence();
      const controller = new AbortController();
      const reading = prefill(runner, sequence, prompt, {
        chunkTokens,
        signal: controller.signal,
        onProgress: () => {
          controller.abort();
        },
        onReport: () => void (calls += 1),
      });
      await expect(reading).rejects.toThrow(/abort/i);
      sequence.dispose();
      for (const each of settle) each();
      await setImmediate();
      expect(settle.length).toBeGreaterThan(0);
      expect(calls).toBe(0);
      (await prefill(runner, runner.openSequence(), prompt)).dispose();
    });
  });
});
