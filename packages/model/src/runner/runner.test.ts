import {
  CapabilityError,
  DisposedError,
  InvalidValueError,
  kvPolicy,
  OutOfMemoryError,
  QueueFullError,
} from '@kv/sparse-core';
import type { PrefillAttention } from '@kv/sparse-core';
import { liveBytes, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { goldenModel, goldenModels, largestDifference, readGolden } from '../testing/golden.js';
import { randomModel, randomNumbers } from '../testing/random-model.js';
import { allLogits, runBatch, withRunner } from '../testing/run-model.js';
import type { BatchEntry } from './batch-entry.js';
import type { Runner } from './runner.js';

/**
 * Batches of other sizes take other kernels, whose f32 sums run in another order. The logits here reach about
 * ten; a hundredth of the tolerance against the reference leaves three digits for that.
 */
const sameLogits = 1e-4;

function randomIds(length: number, seed: number, vocabulary = 320): Int32Array {
  const random = randomNumbers(seed);
  return Int32Array.from({ length }, () => Math.floor(((random() + 1) / 2) * vocabulary));
}

async function lastLogits(runner: Runner, entries: readonly BatchEntry[]): Promise<Float32Array> {
  using batch = runner.createBatch(entries);
  await runBatch(runner, batch);
  using logits = runner.head(batch);
  return await logits.read();
}

describe('the logits are the same', () => {
  it.each(goldenModels)('for chunks of 1, 7, 64 and all tokens (%s)', async (name) => {
    const { ids } = await readGolden(name);
    const [prompt = new Int32Array()] = ids;
    await withRunner(goldenModel(name), { sequences: 4, contextTokens: 256 }, async (runner) => {
      const whole = await allLogits(runner, runner.openSequence(), prompt);
      for (const chunk of [1, 7, 64]) {
        const logits = await allLogits(runner, runner.openSequence(), prompt, chunk);
        expect(largestDifference(logits, whole)).toBeLessThan(sameLogits);
      }
    });
  });

  it('for sequences of 1 to 2048 tokens in one batch and one by one', async () => {
    const lengths = [1, 2, 63, 64, 65, 300, 777, 2048];
    const rows = lengths.reduce((sum, length) => sum + length, 0);
    const options = {
      sequences: lengths.length,
      contextTokens: 2048,
      cacheTokens: rows + 8 * 64,
      maxBatchRows: rows,
    };
    await withRunner(goldenModel('llama31-gqa'), options, async (runner) => {
      const prompts = lengths.map((length, index) => randomIds(length, index));
      const entry = (ids: Int32Array): BatchEntry => ({
        sequence: runner.openSequence(),
        ids,
        phase: 'prefill-end',
      });
      const together = prompts.map(entry);
      const batched = await lastLogits(runner, together);
      for (const { sequence } of together) sequence.dispose();
      for (const [index, ids] of prompts.entries()) {
        const alone = entry(ids);
        const logits = await lastLogits(runner, [alone]);
        alone.sequence.dispose();
        expect(largestDifference(logits, batched.subarray(index * 320, (index + 1) * 320))).toBeLessThan(
          sameLogits,
        );
      }
    });
  });

  it('for a batch that mixes chunks of prompts with tokens of answers, in any order', async () => {
    await withRunner(goldenModel('qwen3'), { sequences: 6, contextTokens: 256 }, async (runner) => {
      const prompts = [randomIds(40, 1), randomIds(70, 2), randomIds(5, 3)];
      const alone = [];
      for (const ids of prompts) alone.push(await allLogits(runner, runner.openSequence(), ids));
      const [a, b, c] = [runner.openSequence(), runner.openSequence(), runner.openSequence()];
      await lastLogits(runner, [
        { sequence: a, ids: randomIds(40, 1).subarray(0, 39), phase: 'prefill-end' },
        { sequence: b, ids: randomIds(70, 2).subarray(0, 30), phase: 'prefill' },
      ]);
      const mixed = await lastLogits(runner, [
        { sequence: a, ids: randomIds(40, 1).subarray(39), phase: 'decode' },
        { sequence: b, ids: randomIds(70, 2).subarray(30), phase: 'prefill-end' },
        { sequence: c, ids: randomIds(5, 3), phase: 'prefill-end' },
      ]);
      for (const [index, logits] of alone.entries()) {
        const last = logits.subarray(logits.length - 320);
        expect(largestDifference(mixed.subarray(index * 320, (index + 1) * 320), last)).toBeLessThan(
          sameLogits,
        );
      }
    });
  });

  it('when the layers of two batches run by turns', async () => {
    await withRunner(goldenModel('qwen2'), { sequences: 4, contextTokens: 128 }, async (runner) => {
      const prompts = [randomIds(60, 4), randomIds(33, 5)];
      const alone = [];
      for (const ids of prompts)
        alone.push((await allLogits(runner, runner.openSequence(), ids)).slice(-320));
      const batches = prompts.map((ids) =>
        runner.createBatch([{ sequence: runner.openSequence(), ids, phase: 'prefill-end' }]),
      );
      for (const batch of batches) runner.embed(batch);
      await Promise.all(
        [0, 1].flatMap((layer) => batches.map((batch) => runner.runLayers(batch, layer, layer + 1))),
      );
      for (const [index, batch] of batches.entries()) {
        using logits = runner.head(batch);
        expect(largestDifference(await logits.read(), alone[index] ?? [])).toBeLessThan(sameLogits);
        batch.dispose();
      }
    });
  });
});

describe('a batch is refused', () => {
  const withSmall = (use: (runner: Runner) => Promise<void> | void): Promise<void> =>
    withRunner(goldenModel('mistral'), { contextTokens: 64, maxBatchRows: 48 }, async (runner) => {
      await use(runner);
    });
  const cases: [string, number[] | Int32Array, BatchEntry['phase'], RegExp][] = [
    ['without tokens', [], 'prefill', /tokens to add: given 0/],
    ['with more tokens than the context', randomIds(65, 1), 'prefill', /contextTokens is 64, and 65 tokens were given/],
    ['with a token id beyond the vocabulary', [1, 320], 'prefill', /token id at 1: given 320/],
    ['with a negative token id', [-1], 'prefill', /token id at 0: given -1/],
    ['with a fractional token id', [0.5], 'prefill', /token id at 0/],
    ['with two tokens to decode', [1, 2], 'decode', /decode entry: given 2/],
  ];
  it.each(cases)('%s', (_name, ids, phase, message) =>
    withSmall((runner) => {
      const sequence = runner.openSequence();
      expect(() => runner.createBatch([{ sequence, ids, phase }])).toThrow(InvalidValueError);
      expect(() => runner.createBatch([{ sequence, ids, phase }])).toThrow(message);
      expect(runner.kvBytes.device).toBe(0);
    }),
  );

  it('of several sequences with more rows than the largest batch', () =>
    withRunner(goldenModel('mistral'), { sequences: 2, contextTokens: 64, maxBatchRows: 48 }, (runner) => {
      const entries = [48, 1].map((rows): BatchEntry => ({ sequence: runner.openSequence(), ids: randomIds(rows, 1), phase: 'prefill' }));
      expect(() => runner.createBatch(entries)).toThrow(InvalidValueError);
      expect(() => runner.createBatch(entries)).toThrow(/rows of a batch of several, which maxBatchRows limits: given 49/);
      return Promise.resolve();
    }));

  it('without entries, or with one sequence twice', () =>
    withSmall((runner) => {
      const sequence = runner.openSequence();
      const entry: BatchEntry = { sequence, ids: [1], phase: 'prefill' };
      expect(() => runner.createBatch([])).toThrow(InvalidValueError);
      expect(() => runner.createBatch([entry, entry])).toThrow(InvalidValueError);
    }));

  it('whose layers are asked for out of order', () =>
    withSmall(async (runner) => {
      using batch = runner.createBatch([{ sequence: runner.openSequence(), ids: [1, 2], phase: 'prefill' }]);
      await expect(runner.runLayers(batch, 0, 1)).rejects.toThrow(/next step is embed, not layer 0/);
      runner.embed(batch);
      expect(() => {
        runner.embed(batch);
      }).toThrow(InvalidValueError);
      expect(() => runner.head(batch)).toThrow(/next step is layer 0, not head/);
      await expect(runner.runLayers(batch, 1, 2)).rejects.toThrow(InvalidValueError);
      await expect(runner.runLayers(batch, 0, 3)).rejects.toThrow(/end: given 3/);
    }));

  it('that was made before another of its sequence had passed', () =>
    withSmall(async (runner) => {
      const sequence = runner.openSequence();
      const entry: BatchEntry = { sequence, ids: [1, 2], phase: 'prefill' };
      using first = runner.createBatch([entry]);
      using second = runner.createBatch([entry]);
      runner.embed(first);
      runner.embed(second);
      await runner.runLayers(first, 0, 1);
      await expect(runner.runLayers(second, 0, 1)).rejects.toThrow(/another batch is between its layers/);
      await runner.runLayers(first, 1, 2);
      await expect(runner.runLayers(second, 0, 2)).rejects.toThrow(/position 0 of a sequence of 2 tokens/);
      expect(sequence.length).toBe(2);
    }));

  it('after the sequence, or the runner, was disposed', () =>
    withSmall(async (runner) => {
      const sequence = runner.openSequence();
      using batch = runner.createBatch([{ sequence, ids: [1], phase: 'prefill' }]);
      runner.embed(batch);
      sequence.dispose();
      await expect(runner.runLayers(batch, 0, 2)).rejects.toThrow(DisposedError);
      expect(() => runner.createBatch([{ sequence, ids: [1], phase: 'prefill' }])).toThrow(DisposedError);
      runner.dispose();
      expect(() => runner.openSequence()).toThrow(DisposedError);
    }));

  it('whose sequence would outgrow the sliding window', async () => {
    const model = randomModel({
      ...{
        model_type: 'mistral',
        vocab_size: 50,
        hidden_size: 16,
        intermediate_size: 16,
        num_hidden_layers: 1,
      },
      ...{ num_attention_heads: 2, num_key_value_heads: 1, sliding_window: 8 },
    });
    await withDirectory(model.files, (directory) =>
      withRunner(directory, { contextTokens: 64 }, async (runner) => {
        const sequence = runner.openSequence();
        await lastLogits(runner, [{ sequence, ids: randomIds(8, 1, 50), phase: 'prefill' }]);
        const entry: BatchEntry = { sequence, ids: [1], phase: 'decode' };
        expect(() => runner.createBatch([entry])).toThrow(CapabilityError);
      }),
    );
  });
});

describe('a runner', () => {
  it('refuses more sequences than it has, until one is disposed', () =>
    withRunner(goldenModel('mistral'), { sequences: 2, contextTokens: 64 }, (runner) => {
      const first = runner.openSequence();
      runner.openSequence();
      expect(() => runner.openSequence()).toThrow(QueueFullError);
      first.dispose();
      expect(runner.openSequence().slot).toBe(first.slot);
      return Promise.resolve();
    }));

  it('disposes the sequences of a batch whose policy fails between layers', async () => {
    const prefill: PrefillAttention = {
      name: 'broken',
      attend: () => {
        throw new CapabilityError('broken on purpose');
      },
    };
    const options = { contextTokens: 64, policy: kvPolicy({ prefill }) };
    await withRunner(goldenModel('mistral'), options, async (runner) => {
      const sequence = runner.openSequence();
      using batch = runner.createBatch([{ sequence, ids: [1, 2], phase: 'prefill' }]);
      await expect(runBatch(runner, batch)).rejects.toThrow('broken on purpose');
      expect(sequence.disposed).toBe(true);
      expect(runner.kvBytes.device).toBe(0);
      expect(runner.openSequence().length).toBe(0);
    });
  });

  it('takes ids that are still on the device', async () => {
    await withRunner(goldenModel('mistral'), { sequences: 3, contextTokens: 64 }, async (runner, model) => {
      const ids = randomIds(6, 10);
      using onDevice = model.device.tensor('i32', ['token'], [6], ids);
      const [a, b, c] = [runner.openSequence(), runner.openSequence(), runner.openSequence()];
      const known = await lastLogits(runner, [{ sequence: a, ids, phase: 'prefill-end' }]);
      const both = await lastLogits(runner, [
        { sequence: b, ids: randomIds(9, 11), phase: 'prefill' },
        { sequence: c, ids: onDevice, phase: 'prefill-end' },
      ]);
      expect(largestDifference(both.subarray(320), known)).toBeLessThan(sameLogits);
    });
  });

  it('starts a sequence anew in a slot that another has left', async () => {
    await withRunner(goldenModel('llama2-mha'), { contextTokens: 256 }, async (runner) => {
      const ids = randomIds(90, 6);
      const first = runner.openSequence();
      const logits = await allLogits(runner, first, ids);
      first.dispose();
      const other = runner.openSequence();
      await allLogits(runner, other, randomIds(130, 7));
      other.dispose();
      expect(await allLogits(runner, runner.openSequence(), ids)).toEqual(logits);
    });
  });

  it('returns all memory', async () => {
    await withRunner(goldenModel('llama2-mha'), { contextTokens: 64 }, async (unused, model) => {
      unused.dispose();
      const before = model.device.memory().live;
      const runner = model.createRunner({ contextTokens: 128 });
      await allLogits(runner, runner.openSequence(), randomIds(100, 8));
      expect(runner.kvBytes.device).toBeGreaterThan(0);
      expect(model.device.memory().live).toBeGreaterThan(before);
      runner.dispose();
      expect(await liveBytes(model.device, before)).toBe(before);
    });
  });

  it('refuses a cache that does not fit, and leaves nothing behind', async () => {
    await withRunner(goldenModel('llama2-mha'), { contextTokens: 64 }, (_runner, model) => {
      const before = model.device.memory().live;
      const tooMuch = [
        { sequences: 1_000_000, contextTokens: 4096 },
        { sequences: 2 ** 31 - 1 },
        { cacheTokens: 1e15 },
        { maxBatchRows: 1e15 },
      ];
      for (const options of tooMuch) expect(() => model.createRunner(options)).toThrow(OutOfMemoryError);
      expect(model.device.memory().live).toBe(before);
      return Promise.resolve();
    });
  });

  it('refuses a step for which the cache has no room, and goes on with others', async () => {
    const options = { sequences: 2, contextTokens: 256, cacheTokens: 256 };
    await withRunner(goldenModel('llama2-mha'), options, async (runner) => {
      const [first, second] = [runner.openSequence(), runner.openSequence()];
      await lastLogits(runner, [{ sequence: first, ids: randomIds(250, 9), phase: 'prefill' }]);
      const entry: BatchEntry = { sequence: second, ids: randomIds(200, 9), phase: 'prefill' };
      await expect(lastLogits(runner, [entry])).rejects.toThrow(OutOfMemoryError);
      first.dispose();
      expect((await lastLogits(runner, [entry])).length).toBe(320);
    });
  });

  it.each([{ sequences: 0 }, { sequences: 1e15 }, { contextTokens: 5000 }, { contextTokens: 1e15 }, { cacheTokens: 0.5 }, { maxBatchRows: -1 }, { sequences: 2n as never }])(
    'refuses %o',
    (options) =>
      withRunner(goldenModel('llama2-mha'), { contextTokens: 64 }, (_runner, model) => {
        expect(() => model.createRunner(options)).toThrow(InvalidValueError);
        return Promise.resolve();
      }),
  );
});
