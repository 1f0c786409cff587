import { CapabilityError, densePagedStore, densePrefill, DisposedError, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import type { KvSelector, PrefillAttention } from '@kv/sparse-core';
import { enqueuedFailure, enqueueFailure, eventually, liveBytes } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { prefill } from '../generate/prefill.js';
import type { Model } from '../model.js';
import { needleModel } from '../testing/paths.js';
import { randomNumbers } from '../testing/random-model.js';
import { recordedStep, withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { ModelBatch } from './model-batch.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const maxBatchRows = 16;
const layers = 8;
const store = densePagedStore({ dtype: 'f32', blockTokens: 16 });

const prompt = (seed: number, tokens: number): Int32Array =>
  Int32Array.from({ length: tokens }, (_, index) => 5 + ((31 * index + 97 * seed) % 4000));

/** Keeps every second token, if the last 20 queries, of two chunks, are as many. */
const everySecond: KvSelector = {
  name: 'every second',
  observationWindow: 20,
  select(stream, { store: { layer }, slot, lastQueries, store: held }) {
    if (lastQueries.shape[0] !== 20) throw new CapabilityError('fewer queries');
    const kept = Math.floor((held.lengths(slot)[0] ?? 0) / 2);
    const heads = Array.from({ length: layer.kvHeads }, () => kept);
    const rows = heads.flatMap(() => Array.from({ length: kept }, (_, index) => 2 * index));
    const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [layer.kvHeads, kept], Int32Array.from(rows));
    return { indices, counts: heads };
  },
};

const answer = (runner: Runner, sequence: Sequence, id = 9): Promise<Float32Array> =>
  recordedStep(runner, [{ sequence, ids: [id], phase: 'decode' }]);

/** The logits behind a prompt that is read at once, and of two answers. */
async function oneShot(runner: Runner, sequence: Sequence, ids: Int32Array): Promise<Float32Array[]> {
  using logits = await prefill(runner, sequence, ids);
  return [await logits.read(), await answer(runner, sequence), await answer(runner, sequence, 10)];
}

const begin = (runner: Runner, sequence: Sequence, ids: Int32Array): ModelBatch => {
  const batch = runner.createBatch([{ sequence, ids, phase: 'prefill-end' }]);
  runner.embed(batch);
  return batch;
};

/** Logits of a batch that has passed all layers. */
async function headOf(runner: Runner, batch: ModelBatch): Promise<Float32Array> {
  using logits = runner.head(batch);
  return await logits.read();
}

describeOnEachKind('a prompt of several batches, in segments', (kind) => {
  const options = { kind, policy: kvPolicy({ store }), sequences: 3, contextTokens: 160, maxBatchRows } as const;
  const use = (body: (runner: Runner, model: Model) => Promise<void>): Promise<void> => withRunner(needleModel, options, body);

  it.each([['dense', undefined], ['selected', everySecond]] as const)('has the bits of one that is read at once, wherever it is cut (%s)', (_, select) =>
    use(async (runner) => {
      const other = runner.openSequence();
      (await prefill(runner, other, prompt(9, 30))).dispose();
      for (const [seed, tokens] of [87, 96, 33, 16, 5].entries()) {
        if (select && tokens < 20) continue;
        const ids = prompt(seed, tokens);
        using whole = runner.openSequence({ select });
        const wanted = await oneShot(runner, whole, ids);
        whole.dispose();
        const random = randomNumbers(seed);
        for (let cut = 0; cut < 4; cut += 1) {
          using sequence = runner.openSequence({ select });
          using batch = begin(runner, sequence, ids);
          let done = 0;
          while (batch.nextLayer < layers) {
            const tokenLayers = batch.nextRows + Math.floor(((random() + 1) / 2) * 60);
            const enqueued = await runner.runSegment(batch, tokenLayers);
            expect(enqueued).toBeGreaterThan(0);
            expect(enqueued).toBeLessThanOrEqual(tokenLayers);
            done += enqueued;
            // Whole layers, and of the next one the rows before the one that comes next.
            expect(batch.nextLayer * tokens + batch.nextRow).toBe(done);
            expect(batch.nextRow % maxBatchRows).toBe(0);
            if (random() > 0.6) await runner.moveToHost(batch);
            if (random() > 0.8) await answer(runner, other);
          }
          expect(done).toBe(tokens * layers);
          expect(sequence.length).toBe(tokens);
          expect([await headOf(runner, batch), await answer(runner, sequence), await answer(runner, sequence, 10)]).toEqual(wanted);
          if (other.length > 100) runner.truncate(other, 30);
        }
      }
    }));

  it('has these bits layer by layer, in one step, and of ids on the device', () =>
    use(async (runner, { device }) => {
      const ids = prompt(1, 50);
      using whole = runner.openSequence();
      const [wanted] = await oneShot(runner, whole, ids);
      using byLayer = runner.openSequence();
      using batch = begin(runner, byLayer, ids);
      await runner.runSegment(batch, 20);
      expect([batch.nextLayer, batch.nextRow, batch.nextRows]).toEqual([0, 16, 16]);
      for (const [first, end] of [[0, 1], [1, 5], [5, 8]] as const) await runner.runLayers(batch, first, end);
      expect(await headOf(runner, batch)).toEqual(wanted);
      using onDevice = device.tensor('i32', ['token'], [50], ids);
      for (const given of [ids, onDevice]) {
        using atOnce = runner.openSequence();
        using logits = await runner.step([{ sequence: atOnce, ids: given, phase: 'prefill-end' }]);
        expect(await logits.read()).toEqual(wanted);
      }
    }));

  it('goes on behind the first tokens of another, which keeps its bits', () =>
    use(async (runner) => {
      const [ids, rest] = [prompt(2, 48), prompt(3, 70)];
      using whole = runner.openSequence();
      (await prefill(runner, whole, ids, { endsPrompt: false })).dispose();
      using fork = runner.fork(whole);
      using batch = begin(runner, fork, rest);
      await runner.runSegment(batch, 100);
      expect(() => runner.fork(fork)).toThrow(/between its layers/);
      await runner.runSegment(batch, 10_000);
      const forked = await headOf(runner, batch);
      const [wanted] = await oneShot(runner, whole, rest);
      expect(forked).toEqual(wanted);
      using again = runner.fork(fork);
      expect(await answer(runner, again)).toEqual(await answer(runner, fork));
    }));

  it('counts its rows, where they are', () =>
    use(async (runner, { config }) => {
      using batch = begin(runner, runner.openSequence(), prompt(1, 100));
      const rows = 100 * config.hiddenSize * 4;
      const { device } = batch.bytes;
      expect(batch.bytes.host).toBe(0);
      // An id and a position of each row, and of each chunk of 16 a slot and two ends.
      expect(device).toBe(rows + 4 * 100 * 2 + 4 * 3 * 7);
      await runner.moveToHost(batch);
      await runner.moveToHost(batch);
      expect(batch.bytes).toEqual({ device: device - rows, host: rows });
      await runner.runSegment(batch, 16);
      expect(batch.bytes).toEqual({ device, host: 0 });
    }));

  it('that is given up between its segments leaves nothing behind', () =>
    use(async (runner, { device }) => {
      const select = everySecond;
      const before = { ...device.memory(), kv: runner.kvBytes };
      const random = randomNumbers(7);
      for (let count = 0; count < 30; count += 1) {
        const sequence = runner.openSequence({ select });
        const batch = begin(runner, sequence, prompt(count, 20 + 4 * count));
        for (let segments = Math.floor((random() + 1) * 3); segments > 0 && batch.nextLayer < layers; segments -= 1) {
          await runner.runSegment(batch, batch.nextRows + Math.floor((random() + 1) * 200));
        }
        const moving = random() > 0 ? runner.moveToHost(batch) : undefined;
        if (random() > 0) await moving;
        if (random() > 0) batch.dispose();
        sequence.dispose();
        batch.dispose();
        await moving?.catch((error: unknown) => { expect(error).toBeInstanceOf(DisposedError); });
        if (batch.nextLayer < layers) await expect(runner.runSegment(batch, 1000)).rejects.toThrow(DisposedError);
      }
      await runner.stream.synchronize();
      expect(runner.kvBytes).toEqual(before.kv);
      expect(await liveBytes(device, before.live)).toBe(before.live);
      await eventually(() => device.memory().pinned === before.pinned);
      expect(device.memory().pinned).toBe(before.pinned);
      expect(device.memory().finalized).toBe(before.finalized);
    }));

  it('is refused by name where it cannot go on', () =>
    use(async (runner) => {
      using batch = runner.createBatch([{ sequence: runner.openSequence(), ids: prompt(1, 40), phase: 'prefill-end' }]);
      await expect(runner.runSegment(batch, 100)).rejects.toThrow(/next step is embed, not layer 0/);
      runner.embed(batch);
      for (const tokenLayers of [15, 0, 16.5, NaN, Infinity]) {
        await expect(runner.runSegment(batch, tokenLayers)).rejects.toThrow(InvalidValueError);
      }
      await expect(runner.runSegment(batch, 15)).rejects.toThrow(/tokenLayers: given 15/);
      await runner.runSegment(batch, 40 * layers);
      await expect(runner.runSegment(batch, 100)).rejects.toThrow(/next step is head/);
    }));

  it('waits where the cache has no room for a chunk, and goes on when there is some', () =>
    withRunner(needleModel, { ...options, cacheTokens: 128 }, async (runner) => {
      const ids = prompt(5, 80);
      using alone = runner.openSequence();
      const [wanted] = await oneShot(runner, alone, ids);
      alone.dispose();
      const other = runner.openSequence();
      (await prefill(runner, other, prompt(6, 120))).dispose();
      using sequence = runner.openSequence();
      using batch = begin(runner, sequence, ids);
      await expect(runner.runSegment(batch, 80 * layers)).rejects.toThrow(OutOfMemoryError);
      expect(sequence.disposed).toBe(false);
      const { nextLayer, nextRow } = batch;
      expect(nextLayer).toBeLessThan(layers);
      other.dispose();
      expect(await runner.runSegment(batch, 80 * layers)).toBe(80 * (layers - nextLayer) - nextRow);
      expect(await headOf(runner, batch)).toEqual(wanted);
    }));
});

describeOnEachKind('what fails between segments', (kind) => {
  /** In layer 3 of the second chunk. */
  const failing: PrefillAttention = {
    name: 'failing',
    attend(stream, call) {
      const [entry] = call.batch.entries;
      if (call.store.layer.index === 3 && entry?.position === 16) throw new CapabilityError('broken on purpose');
      return densePrefill().attend(stream, call);
    },
  };

  it('ends the sequence, and its memory is free', () => {
    const policy = kvPolicy({ prefill: failing, store });
    return withRunner(needleModel, { kind, policy, contextTokens: 128, maxBatchRows }, async (runner, { device }) => {
      const { live } = device.memory();
      const sequence = runner.openSequence();
      const batch = begin(runner, sequence, prompt(1, 60));
      await runner.runLayers(batch, 0, 3);
      await expect(runner.runSegment(batch, 1000)).rejects.toThrow('broken on purpose');
      expect(sequence.disposed).toBe(true);
      expect([batch.nextLayer, batch.nextRow]).toEqual([3, 16]);
      await expect(runner.runSegment(batch, 1000)).rejects.toThrow(DisposedError);
      batch.dispose();
      expect(runner.kvBytes).toEqual({ device: 0, host: 0 });
      expect(await liveBytes(device, live)).toBe(live);
    });
  });

  it('on the stream loses the batch, wherever its rows are', () =>
    withRunner(needleModel, { kind, policy: kvPolicy({ store }), contextTokens: 128, maxBatchRows }, async (runner, { device }) => {
      const { live } = device.memory();
      for (const isOnHost of [false, true]) {
        const sequence = runner.openSequence();
        const batch = begin(runner, sequence, prompt(1, 60));
        await runner.runSegment(batch, 100);
        if (isOnHost) await runner.moveToHost(batch);
        enqueueFailure(runner.stream);
        await expect(runner.stream.synchronize()).rejects.toThrow(enqueuedFailure);
        await expect(runner.runSegment(batch, 100)).rejects.toThrow(/batch was ended by an error/);
        await expect(runner.moveToHost(batch)).rejects.toThrow(DisposedError);
        expect(sequence.failure?.message).toMatch(enqueuedFailure);
        batch.dispose();
      }
      expect(await liveBytes(device, live)).toBe(live);
      using sequence = runner.openSequence();
      expect(await oneShot(runner, sequence, prompt(1, 60))).toHaveLength(3);
    }));
});
