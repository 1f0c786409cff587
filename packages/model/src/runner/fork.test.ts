import { CapabilityError, densePagedStore, InvalidValueError, kvPolicy, OutOfMemoryError, QueueFullError } from '@kv/sparse-core';
import type { KvSelector, KvStoreFactory } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import { goldenModel, largestDifference, readGolden } from '../testing/golden.js';
import { runBatch, withRunner } from '../testing/run-model.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const { ids } = await readGolden('qwen3');
const text = ids[0] ?? new Int32Array();
const [document, question] = [text.subarray(0, 80), text.subarray(80, 90)];
const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32', blockTokens: 16 }) });
const kvHeads = 2;

/**
 * Chunks of other sizes take other kernels, whose f32 sums run in another order. The logits here reach about ten;
 * a hundredth of the tolerance against the reference leaves three digits for that.
 */
const sameLogits = 1e-4;

/** Keeps, of what the slot holds, the tokens that `keeps` names. */
function selector(keeps: (held: number) => number[], observationWindow = 8): KvSelector {
  return {
    name: 'test',
    observationWindow,
    select(stream, { store, slot }) {
      const kept = keeps(store.lengths(slot)[0] ?? 0);
      const rows = Int32Array.from([...kept, ...kept]);
      const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [kvHeads, kept.length], rows);
      return { indices, counts: [kept.length, kept.length] };
    },
  };
}

const everyThird = selector((held) => Array.from({ length: Math.ceil(held / 3) }, (_, index) => 3 * index));
const everything = selector((held) => Array.from({ length: held }, (_, index) => index));

/** The logits behind the last of `tokens`. */
async function read(runner: Runner, sequence: Sequence, tokens: Int32Array, endsPrompt = true): Promise<Float32Array> {
  using logits = await prefill(runner, sequence, tokens, { endsPrompt });
  return await logits.read();
}

const withFourSequences = (use: (runner: Runner) => Promise<void>): Promise<void> =>
  withRunner(goldenModel('qwen3'), { policy, sequences: 4, contextTokens: 128 }, use);

describe('a fork', () => {
  it('goes on like the sequence itself, and neither disturbs the other', () =>
    withFourSequences(async (runner) => {
      using original = runner.openSequence();
      await read(runner, original, document);
      const once = runner.kvBytes.device;
      using fork = runner.fork(original);
      expect(fork.length).toBe(80);
      // Eighty tokens fill their blocks of 16, all of which both hold.
      expect(runner.kvBytes.device).toBe(once);
      const forked = await read(runner, fork, question);
      expect(runner.kvBytesOf(original)).toEqual({ device: once, host: 0 });
      expect(runner.kvBytesOf(fork).device).toBe((once * 6) / 5);
      expect(runner.kvBytes.device).toBe((once * 6) / 5);
      expect(original.length).toBe(80);
      expect(await read(runner, original, question)).toEqual(forked);
      fork.dispose();
      using whole = runner.openSequence();
      expect(largestDifference(await read(runner, whole, text.subarray(0, 90)), forked)).toBeLessThan(sameLogits);
    }));

  it('of an unfinished prompt selects what a sequence of its own would select', () =>
    withFourSequences(async (runner) => {
      const observed: Float32Array[] = [];
      const reads: Promise<unknown>[] = [];
      const observe = (window: number): KvSelector => ({
        ...everyThird,
        observationWindow: window,
        select(stream, call) {
          if (call.store.layer.index === 0) {
            reads.push(call.lastQueries.read().then((queries) => observed.push(queries as Float32Array)));
          }
          return everyThird.select(stream, call);
        },
      });
      using alone = runner.openSequence({ select: observe(24) });
      const wanted = await read(runner, alone, text.subarray(0, 90));
      using original = runner.openSequence({ select: observe(32) });
      await read(runner, original, document, false);
      using fork = runner.fork(original, { select: observe(24) });
      expect(largestDifference(await read(runner, fork, question), wanted)).toBeLessThan(sameLogits);
      await Promise.all(reads);
      const [first = new Float32Array(), second = new Float32Array()] = observed;
      expect(first).toHaveLength(24 * 4 * 64);
      expect(largestDifference(second, first)).toBeLessThan(sameLogits);
      const next = async (sequence: Sequence): Promise<Float32Array> => {
        using batch = runner.createBatch([{ sequence, ids: [5], phase: 'decode' }]);
        await runBatch(runner, batch);
        using logits = runner.head(batch);
        return await logits.read();
      };
      expect(largestDifference(await next(fork), await next(alone))).toBeLessThan(sameLogits);
      expect(original.length).toBe(80);
    }));

  it('of the first tokens goes on as a sequence that has read no more', () =>
    withFourSequences(async (runner) => {
      using original = runner.openSequence();
      await read(runner, original, text.subarray(0, 90));
      for (const tokens of [0, 32, 37, 90]) {
        using fork = runner.fork(original, { tokens });
        expect([...fork.ids]).toEqual([...text.subarray(0, tokens)]);
        expect(fork.promptEnd).toBe(tokens);
        using alone = runner.openSequence();
        if (tokens > 0) await read(runner, alone, text.subarray(0, tokens));
        const wanted = await read(runner, alone, question);
        expect(largestDifference(await read(runner, fork, question), wanted)).toBeLessThan(sameLogits);
      }
      expect(original.length).toBe(90);
      for (const tokens of [-1, 91, 1.5, NaN]) expect(() => runner.fork(original, { tokens })).toThrow(InvalidValueError);
    }));

  it('of the first tokens is refused where only a selection of them is left', () =>
    withFourSequences(async (runner) => {
      using original = runner.openSequence({ select: everyThird });
      await read(runner, original, document);
      await read(runner, original, question, false);
      for (const id of [5, 6, 7]) (await runner.step([{ sequence: original, ids: [id], phase: 'decode' }])).dispose();
      expect(() => runner.fork(original, { tokens: 89 })).toThrow(CapabilityError);
      using fork = runner.fork(original, { tokens: 91 });
      expect(fork.length).toBe(91);
      expect(fork.promptEnd).toBe(90);
      runner.truncate(original, 91);
      const next = async (sequence: Sequence): Promise<Float32Array> => {
        using logits = await runner.step([{ sequence, ids: [9], phase: 'decode' }]);
        return await logits.read();
      };
      expect(await next(fork)).toEqual(await next(original));
    }));

  it("is refused of another runner's sequence", () =>
    withFourSequences((runner) =>
      withFourSequences(async (other) => {
        using sequence = other.openSequence();
        await read(other, sequence, document);
        expect(() => runner.fork(sequence)).toThrow(InvalidValueError);
        expect(() => runner.kvBytesOf(sequence)).toThrow(InvalidValueError);
        expect(runner.kvBytes.device).toBe(0);
      }),
    ));

  it('is refused where it cannot be right', () =>
    withFourSequences(async (runner) => {
      using sequence = runner.openSequence({ select: everyThird });
      await read(runner, sequence, document, false);
      const greedy = selector(() => [0], 9);
      expect(() => runner.fork(sequence, { select: greedy })).toThrow(InvalidValueError);
      using batch = runner.createBatch([{ sequence, ids: [5], phase: 'decode' }]);
      runner.embed(batch);
      await runner.runLayers(batch, 0, 1);
      expect(() => runner.fork(sequence)).toThrow(/between its layers/);
      await runner.runLayers(batch, 1, 2);
      const forks = [runner.fork(sequence), runner.fork(sequence), runner.fork(sequence)];
      expect(() => runner.fork(sequence)).toThrow(QueueFullError);
      for (const fork of forks) fork.dispose();
    }));

  it('without room for it leaves everything as it was', () =>
    withRunner(
      goldenModel('qwen3'),
      // Six blocks a head: the tokens take them all, and the last one, which is not full, cannot be shared.
      { policy, sequences: 2, contextTokens: 128, cacheTokens: 64 },
      async (runner) => {
        using sequence = runner.openSequence();
        await read(runner, sequence, text.subarray(0, 90));
        const { device } = runner.kvBytes;
        expect(() => runner.fork(sequence)).toThrow(OutOfMemoryError);
        expect(runner.kvBytes.device).toBe(device);
        runner.openSequence().dispose();
      },
    ));

  it('needs a store that can be copied', async () => {
    const { store: dense } = policy;
    const store: KvStoreFactory = {
      name: 'without copy',
      create: (layers, capacity) =>
        dense.create(layers, capacity).map((each) => Object.defineProperty(each, 'copy', { value: undefined })),
    };
    await withRunner(
      goldenModel('qwen3'),
      { policy: kvPolicy({ store }), sequences: 2, contextTokens: 128 },
      async (runner) => {
        using sequence = runner.openSequence();
        await read(runner, sequence, document);
        expect(() => runner.fork(sequence)).toThrow(CapabilityError);
        runner.openSequence().dispose();
      },
    );
  });
});

describe('a prompt that goes on after a selection', () => {
  it('is as if nothing had happened when everything was kept', () =>
    withFourSequences(async (runner) => {
      using kept = runner.openSequence({ select: everything });
      using whole = runner.openSequence();
      await read(runner, kept, document);
      await read(runner, whole, document);
      expect(await read(runner, kept, question, false)).toEqual(await read(runner, whole, question, false));
    }));

  it('stands at its true positions, and token by token gives the same as at once', () =>
    withFourSequences(async (runner) => {
      using chunk = runner.openSequence({ select: everyThird });
      using single = runner.openSequence({ select: everyThird });
      using whole = runner.openSequence();
      for (const sequence of [chunk, single]) await read(runner, sequence, document);
      await read(runner, whole, document);
      const atOnce = await read(runner, chunk, question, false);
      let last: Float32Array = new Float32Array();
      for (const id of question) {
        using batch = runner.createBatch([{ sequence: single, ids: [id], phase: 'decode' }]);
        await runBatch(runner, batch);
        using logits = runner.head(batch);
        last = await logits.read();
      }
      expect(largestDifference(last, atOnce)).toBeLessThan(sameLogits);
      expect(chunk.length).toBe(90);
      // Two thirds of the document are gone, which shows.
      expect(largestDifference(await read(runner, whole, question, false), atOnce)).toBeGreaterThan(0.01);
    }));

  it('generates from a sequence of the caller, who keeps it', () =>
    withFourSequences(async (runner) => {
      const answer = async (prompt: Int32Array, sequence?: Sequence): Promise<number[]> => {
        const chosen: number[] = [];
        const options = { maxTokens: 6, endIds: [], ...(sequence && { sequence }) };
        for await (const { id } of generateTokens(runner, prompt, options)) chosen.push(id);
        return chosen;
      };
      using sequence = runner.openSequence();
      await read(runner, sequence, document, false);
      using fork = runner.fork(sequence);
      const continued = await answer(question, fork);
      expect(continued).toHaveLength(6);
      expect(continued).toEqual(await answer(text.subarray(0, 90)));
      expect(fork.disposed).toBe(false);
      expect(fork.length).toBe(96);
    }));
});
