import { createDevice, densePagedStore, DisposedError, kvPolicy } from '@kv/sparse-core';
import type { KvSelector, SelectCall } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { Model } from '../model.js';
import { goldenModel, largestDifference, readGolden } from '../testing/golden.js';
import { allLogits, runBatch, withRunner } from '../testing/run-model.js';
import type { Phase } from './batch-entry.js';
import type { Runner } from './runner.js';

const store = densePagedStore({ dtype: 'f32', blockTokens: 16 });
const { ids } = await readGolden('qwen3');
const prompt = (ids[0] ?? new Int32Array()).subarray(0, 90);
const kvHeads = 2;

/** Keeps the tokens that `keeps` names in every head, and hands each call to `see`. */
function selector(
  observationWindow: number,
  keeps: readonly number[] | undefined,
  see: (call: SelectCall) => void = () => undefined,
): KvSelector {
  return {
    name: 'test',
    observationWindow,
    select(stream, call) {
      see(call);
      if (keeps === undefined) return undefined;
      const rows = Int32Array.from(
        { length: kvHeads * keeps.length },
        (_, index) => keeps[index % keeps.length] ?? 0,
      );
      const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [kvHeads, keeps.length], rows);
      return { indices, counts: new Array<number>(kvHeads).fill(keeps.length) };
    },
  };
}

const withSelector = <Result>(
  select: KvSelector,
  use: (runner: Runner, model: Model) => Promise<Result>,
): Promise<Result> =>
  withRunner(goldenModel('qwen3'), { contextTokens: 128, policy: kvPolicy({ store, select }) }, use);

async function decode(runner: Runner, chunkTokens: number): Promise<Float32Array> {
  using sequence = runner.openSequence();
  await allLogits(runner, sequence, prompt, chunkTokens);
  using batch = runner.createBatch([{ sequence, ids: [5], phase: 'decode' }]);
  await runBatch(runner, batch);
  using logits = runner.head(batch);
  return await logits.read();
}

describe('a policy that selects tokens', () => {
  it.each([1, 16, 40, 90, 100])(
    'sees the last %d queries of the prompt in every layer, whatever the chunks',
    async (window) => {
      const seen = new Map<number, Float32Array[]>();
      const reads: Promise<unknown>[] = [];
      const select = selector(window, undefined, ({ store: { layer }, lastQueries }) => {
        expect(lastQueries.shape).toEqual([Math.min(window, prompt.length), 4, 64]);
        const read = lastQueries
          .read()
          .then((queries) =>
            seen.set(layer.index, [...(seen.get(layer.index) ?? []), queries as Float32Array]),
          );
        reads.push(read);
      });
      await withSelector(select, async (runner) => {
        for (const chunk of [90, 1, 7, 64]) await decode(runner, chunk);
      });
      await Promise.all(reads);
      expect(seen.size).toBe(2);
      for (const [whole = new Float32Array(), ...chunked] of seen.values()) {
        expect(chunked).toHaveLength(3);
        // The same f32 sums in another order.
        for (const queries of chunked) expect(largestDifference(queries, whole)).toBeLessThan(1e-4);
      }
    },
  );

  it('changes nothing when it keeps every token', async () => {
    const every = prompt.length;
    const kept = await withSelector(
      selector(
        8,
        Array.from({ length: every }, (_, token) => token),
      ),
      (runner) => decode(runner, 7),
    );
    const dense = await withSelector(selector(8, undefined), (runner) => decode(runner, 7));
    expect(kept).toEqual(dense);
  });

  it('gives back the memory of the others, and keeps the true position of the next token', () =>
    withSelector(selector(8, [0, 1, 2, 50, 59]), async (runner) => {
      using sequence = runner.openSequence();
      await allLogits(runner, sequence, prompt.subarray(0, 60), 60);
      const blockBytes = 2 * 16 * 64 * 4;
      expect(runner.kvBytes.device).toBe(2 * kvHeads * blockBytes);
      expect(sequence.length).toBe(60);
    }));

  it('may be waited for, and touches no slot whose sequence was disposed meanwhile', async () => {
    let seen = 0;
    let decide: (keeps: boolean) => void = () => undefined;
    const five = selector(8, [0, 1, 2, 50, 59]);
    const select: KvSelector = {
      ...five,
      async select(stream, call) {
        const keeps = await new Promise<boolean>((resolve) => {
          seen += 1;
          decide = resolve;
          if (seen % 2 === 1) resolve(true);
        });
        return keeps ? await five.select(stream, call) : undefined;
      },
    };
    await withSelector(select, async (runner) => {
      const blockBytes = 2 * 16 * 64 * 4;
      const first = runner.openSequence();
      using batch = runner.createBatch([{ sequence: first, ids: prompt.subarray(0, 60), phase: 'prefill-end' }]);
      runner.embed(batch);
      const run = runner.runLayers(batch, 0, 2);
      while (seen < 2) await new Promise(setImmediate);
      // One layer has dropped tokens, the other waits.
      expect(runner.kvBytes.device).toBe((kvHeads + kvHeads * 4) * blockBytes);
      first.dispose();
      decide(true);
      await run;
      await runner.stream.synchronize();
      expect(runner.kvBytes.device).toBe(0);
    });
  });

  it('shows a sequence no queries of one that was disposed while another was waited for', async () => {
    const seen: number[] = [];
    let decide: () => void = () => undefined;
    const select: KvSelector = {
      name: 'test',
      observationWindow: 16,
      async select(_stream, { lastQueries }) {
        seen.push(lastQueries.shape[0]);
        if (seen.length === 1) await new Promise<void>((resolve) => (decide = resolve));
        return undefined;
      },
    };
    const options = { contextTokens: 128, sequences: 2, policy: kvPolicy({ store, select }) };
    await withRunner(goldenModel('qwen3'), options, async (runner) => {
      const [waited, given] = [runner.openSequence(), runner.openSequence()];
      using batch = runner.createBatch([
        { sequence: waited, ids: prompt.subarray(0, 20), phase: 'prefill-end' },
        { sequence: given, ids: prompt.subarray(0, 20), phase: 'prefill' },
      ]);
      runner.embed(batch);
      const run = runner.runLayers(batch, 0, 2);
      while (seen.length === 0) await new Promise(setImmediate);
      given.dispose();
      decide();
      await expect(run).rejects.toThrow(DisposedError);
      using first = runner.openSequence();
      using second = runner.openSequence();
      for (const sequence of [first, second]) await allLogits(runner, sequence, prompt.subarray(0, 3), 3);
      // In both layers of both.
      expect(seen).toEqual([16, 3, 3, 3, 3]);
    });
  });

  it('sees in a later turn the queries of what was read since the last answer, and how many tokens there were', async () => {
    const seen: [queries: number, tokens: number][] = [];
    const select = selector(16, undefined, ({ lastQueries, tokens }) => seen.push([lastQueries.shape[0], tokens]));
    const options = { contextTokens: 128, sequences: 2, policy: kvPolicy({ store, select }) };
    await withRunner(goldenModel('qwen3'), options, async (runner) => {
      using sequence = runner.openSequence();
      const read = async (tokens: number, phase: Phase): Promise<void> => {
        const entry = { sequence, ids: prompt.subarray(0, tokens), phase };
        (await runner.step([entry])).dispose();
      };
      await read(30, 'prefill');
      await read(1, 'decode');
      await read(4, 'prefill');
      // A fork's window is that of its sequence.
      using fork = runner.fork(sequence);
      await read(5, 'prefill-end');
      await read(1, 'decode');
      await read(3, 'prefill-end');
      (await runner.step([{ sequence: fork, ids: prompt.subarray(0, 2), phase: 'prefill-end' }])).dispose();
      // The answer is taken back: its prompt goes on.
      await read(2, 'prefill');
      await read(1, 'decode');
      runner.truncate(sequence, sequence.length - 1);
      await read(2, 'prefill-end');
    });
    const both = (queries: number, tokens: number) => [[queries, tokens], [queries, tokens]];
    expect(seen).toEqual([...both(9, 40), ...both(3, 44), ...both(6, 37), ...both(4, 48)]);
  });

  it('leaves no memory behind when a prompt is given up', async () => {
    using model = await Model.open(goldenModel('qwen3'), { device: createDevice({ threads: 1 }) });
    using runner = model.createRunner({
      contextTokens: 128,
      policy: kvPolicy({ store, select: selector(16, [0]) }),
    });
    await runner.stream.synchronize();
    const before = model.device.memory().live;
    const sequence = runner.openSequence();
    {
      using batch = runner.createBatch([{ sequence, ids: prompt, phase: 'prefill' }]);
      await runBatch(runner, batch);
    }
    sequence.dispose();
    await runner.stream.synchronize();
    expect(model.device.memory().live).toBe(before);
  });
});
