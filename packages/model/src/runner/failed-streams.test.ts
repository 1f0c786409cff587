import { densePagedStore, densePrefill, DisposedError, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import type { PrefillAttention } from '@kv/sparse-core';
import { enqueuedFailure, enqueueFailure, liveBytes } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import type { Model } from '../model.js';
import { withRunner } from '../testing/run-model.js';
import { needleModel } from '../testing/paths.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const prompt = (seed: number, tokens = 40): number[] =>
  Array.from({ length: tokens }, (_, index) => 5 + ((31 * index + 97 * seed) % 4000));

/** In layer 2 of prompts of 33 tokens it fails its stream. */
const failing: PrefillAttention = {
  name: 'sometimes failing',
  attend(stream, call) {
    const { rows } = call.batch;
    if (call.store.layer.index === 2 && rows === 33) enqueueFailure(stream);
    return densePrefill().attend(stream, call);
  },
};

describeOnEachKind('an operation that fails its stream', (kind) => {
  const use = (body: (runner: Runner, model: Model) => Promise<void>): Promise<void> => {
    const policy = kvPolicy({ prefill: failing, store: densePagedStore({ dtype: 'f32', blockTokens: 16 }) });
    return withRunner(needleModel, { kind, policy, sequences: 6, contextTokens: 128 }, body);
  };

  async function open(runner: Runner, seed: number): Promise<Sequence> {
    const sequence = runner.openSequence();
    (await prefill(runner, sequence, prompt(seed))).dispose();
    return sequence;
  }

  async function step(runner: Runner, sequences: readonly Sequence[], id = 9): Promise<Float32Array> {
    using logits = await runner.step(sequences.map((sequence) => ({ sequence, ids: [id], phase: 'decode' })));
    return await logits.read();
  }

  const fail = async (runner: Runner): Promise<Sequence> => {
    const sequence = runner.openSequence();
    const reading = prefill(runner, sequence, prompt(3, 33));
    await expect(reading).rejects.toThrow(InvalidValueError);
    await expect(reading).rejects.toThrow(enqueuedFailure);
    return sequence;
  };

  it('ends the sequences of its step, and others keep their bits', () =>
    use(async (runner, model) => {
      const { live } = model.device.memory();
      const untouched = model.createRunner({ policy: runner.policy, activations: 'f32', sequences: 6, contextTokens: 128 });
      const [ours, theirs] = [await open(runner, 1), await open(untouched, 1)];
      const [fork, theirFork] = [runner.fork(ours), untouched.fork(theirs)];
      expect(await step(runner, [ours])).toEqual(await step(untouched, [theirs]));
      const held = runner.kvBytes;
      for (let count = 0; count < 10; count += 1) {
        const { stream } = runner;
        const failed = await fail(runner);
        expect(failed.failure?.message).toMatch(enqueuedFailure);
        expect(() => { runner.checkTokens(failed, [1]); }).toThrow(DisposedError);
        expect(() => { runner.checkTokens(failed, [1]); }).toThrow(enqueuedFailure);
        // What lay on the stream that failed says so.
        await expect(stream.synchronize()).rejects.toThrow(enqueuedFailure);
        expect([ours.disposed, fork.disposed]).toEqual([false, false]);
        expect(runner.kvBytes).toEqual(held);
        // The steps of two are recorded anew, and slots that failed sequences had are empty.
        expect(await step(runner, [ours, fork], count)).toEqual(await step(untouched, [theirs, theirFork], count));
        const [fresh, theirFresh] = [await open(runner, count), await open(untouched, count)];
        expect(await step(runner, [fresh])).toEqual(await step(untouched, [theirFresh]));
        for (const each of [fresh, theirFresh]) each.dispose();
        // Room for the next tokens stays with them.
        for (const [sequence, at] of [[ours, 41], [fork, 40]] as const) runner.truncate(sequence, at);
        for (const [sequence, at] of [[theirs, 41], [theirFork, 40]] as const) untouched.truncate(sequence, at);
        await Promise.all([runner.stream.synchronize(), untouched.stream.synchronize()]);
      }
      for (const each of [untouched, ours, fork]) each.dispose();
      // Recorded steps go with their stream.
      await fail(runner);
      expect(await liveBytes(model.device, live)).toBe(live);
    }));

  it('ends a sequence whose last step nobody has waited for, with the failure as its cause', () =>
    use(async (runner) => {
      const [waited, forgotten] = [await open(runner, 1), await open(runner, 2)];
      const logits = await runner.step([{ sequence: forgotten, ids: [9], phase: 'decode' }]);
      const batch = runner.createBatch([{ sequence: waited, ids: [9], phase: 'decode' }]);
      runner.embed(batch);
      enqueueFailure(runner.stream);
      await expect(runner.stream.synchronize()).rejects.toThrow(enqueuedFailure);
      expect(forgotten.failure?.message).toMatch(enqueuedFailure);
      expect(waited.failure).toBeUndefined();
      await expect(logits.read()).rejects.toThrow(enqueuedFailure);
      await expect(step(runner, [forgotten])).rejects.toThrow(DisposedError);
      // Nor is it known what the batch holds.
      await expect(runner.runLayers(batch, 0, 1)).rejects.toThrow(/batch was ended by an error \(embedding: ids\[0\] is 7/);
      expect(await step(runner, [waited])).toHaveLength(4096);
      for (const each of [logits, batch]) each.dispose();
    }));

  it('does not end a sequence whose step was refused for want of room', () =>
    use(async (_runner, model) => {
      const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32', blockTokens: 16 }) });
      // Five blocks a head, of which 40 tokens take three and 32 two.
      using runner = model.createRunner({ policy, activations: 'f32', sequences: 3, contextTokens: 64, cacheTokens: 32 });
      const sequences = [runner.openSequence(), runner.openSequence()] as const;
      for (const [index, tokens] of [40, 32].entries()) {
        (await prefill(runner, sequences[index === 0 ? 0 : 1], prompt(index, tokens))).dispose();
      }
      const [, full] = sequences;
      for (const phase of ['decode', 'prefill'] as const) {
        await expect(runner.step([{ sequence: full, ids: [9], phase }])).rejects.toThrow(OutOfMemoryError);
      }
      await runner.stream.synchronize();
      enqueueFailure(runner.stream);
      await expect(runner.stream.synchronize()).rejects.toThrow(enqueuedFailure);
      expect(sequences.map(({ disposed }) => disposed)).toEqual([false, false]);
      sequences[0].dispose();
      expect(await step(runner, [full])).toHaveLength(4096);
    }));

  it('ends the answers that were being given, and the next ones are what they were', () =>
    use(async (runner) => {
      const answer = async (sequence?: Sequence): Promise<number[]> => {
        const ids: number[] = [];
        for await (const { id } of generateTokens(runner, prompt(5), { maxTokens: 6, endIds: [], sequence })) ids.push(id);
        return ids;
      };
      const wanted = await answer();
      const given = runner.openSequence();
      const answering = generateTokens(runner, prompt(5), { sequence: given, endIds: [] });
      await answering.next();
      await fail(runner);
      await expect(answering.next()).rejects.toThrow(enqueuedFailure);
      expect(given.disposed).toBe(true);
      expect(await answer()).toEqual(wanted);
      expect(await answer(runner.openSequence())).toEqual(wanted);
    }));

  it('leaves a step that waits for its turn to others, whose recording went with the stream', () =>
    use(async (runner) => {
      const [waiting, same] = [await open(runner, 1), await open(runner, 1)];
      for (const sequence of [waiting, same]) await step(runner, [sequence]);
      const selecting = runner.openSequence({
        select: {
          name: 'failing',
          observationWindow: 1,
          async select(stream) {
            enqueueFailure(stream);
            await stream.synchronize().catch(() => undefined);
            return undefined;
          },
        },
      });
      const reading = prefill(runner, selecting, prompt(2));
      const stepping = step(runner, [waiting]);
      await expect(reading).rejects.toThrow(enqueuedFailure);
      expect(await stepping).toEqual(await step(runner, [same]));
    }));

  it('does not end a runner whose batches are in turn', () =>
    use(async (runner) => {
      const kept = await open(runner, 1);
      const [first, second] = [runner.openSequence(), runner.openSequence()];
      const outcomes = await Promise.allSettled([
        prefill(runner, first, prompt(3, 33)),
        prefill(runner, second, prompt(4, 50), { chunkTokens: 10 }),
        fail(runner),
      ]);
      expect(outcomes.map(({ status }) => status)).toEqual(['rejected', 'rejected', 'fulfilled']);
      expect([first.disposed, second.disposed, kept.disposed]).toEqual([true, true, false]);
      expect(await step(runner, [kept])).toHaveLength(4096);
    }));
});
