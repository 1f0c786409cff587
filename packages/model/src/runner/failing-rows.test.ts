import { densePagedStore, DisposedError, InvalidValueError, kvPolicy, sample } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import { generateTokens } from '../generate/generate-tokens.js';
import { prefill } from '../generate/prefill.js';
import type { Model } from '../model.js';
import { needleModel } from '../testing/paths.js';
import { withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { BatchEntry } from './batch-entry.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const vocabulary = 4096;
const prompt = (seed: number, tokens = 40): number[] =>
  Array.from({ length: tokens }, (_, index) => 5 + ((31 * index + 97 * seed) % 4000));
const dense = densePagedStore({ dtype: 'f32', blockTokens: 16 });

describeOnEachKind('what fails in one row of a batch', (kind) => {
  const use = (body: (runner: Runner, model: Model) => Promise<void>, select?: KvSelector, sequences = 8): Promise<void> => {
    const policy = kvPolicy({ store: dense, ...(select && { select }) });
    return withRunner(needleModel, { kind, policy, sequences, contextTokens: 128 }, body);
  };

  async function open(runner: Runner, seed: number): Promise<Sequence> {
    const sequence = runner.openSequence();
    (await prefill(runner, sequence, prompt(seed))).dispose();
    return sequence;
  }

  async function step(runner: Runner, entries: readonly BatchEntry[]): Promise<Float32Array> {
    using logits = await runner.step(entries);
    return await logits.read();
  }

  const rowsOf = (logits: Float32Array): Float32Array[] =>
    Array.from({ length: logits.length / vocabulary }, (_, row) => logits.subarray(row * vocabulary, (row + 1) * vocabulary));

  it.each([
    ['a recorded step', 'decode'],
    ['a mixed step', 'prefill'],
  ] as const)('an id on the device outside the vocabulary leaves the bits of its neighbours, in %s', (_name, phase) =>
    use(async (runner, model) => {
      // The same three sequences twice: beside a row that fails, and beside one that does not.
      const [ours, theirs] = [[], []] as [Sequence[], Sequence[]];
      for (const group of [ours, theirs]) for (let seed = 0; seed < 4; seed += 1) group.push(await open(runner, seed));
      const [bad] = ours;
      for (let count = 0; count < 20; count += 1) {
        using outside = model.device.tensor('i32', ['token'], [1], Int32Array.of(count % 2 === 0 ? -1 : vocabulary));
        const entries = (group: readonly Sequence[], first: BatchEntry['ids']): BatchEntry[] =>
          group.map((sequence, index) => ({
            sequence,
            ids: index === 0 ? first : [7 + index + count],
            phase: index === 1 ? phase : 'decode',
          }));
        const [failing, ...neighbours] = rowsOf(await step(runner, entries(ours, outside)));
        const [, ...wanted] = rowsOf(await step(runner, entries(theirs, [9])));
        expect(failing?.every(Number.isNaN)).toBe(true);
        expect(neighbours).toEqual(wanted);
      }
      // Its blocks go to another, who sees nothing of it.
      bad?.dispose();
      theirs[0]?.dispose();
      const [taking, fresh] = [await open(runner, 8), await open(runner, 8)];
      const entry = (sequence: Sequence): BatchEntry => ({ sequence, ids: [5], phase: 'decode' });
      expect(await step(runner, [entry(taking)])).toEqual(await step(runner, [entry(fresh)]));
      await runner.stream.synchronize();
    }),
  );

  it('a row of NaN leaves the bits of 63 neighbours in a recorded step', () =>
    use(
      async (runner, model) => {
        const decode = async (bad: number): Promise<Float32Array[]> => {
          const entries = Array.from({ length: 64 }, (_, index): BatchEntry => ({ sequence: runner.openSequence(), ids: prompt(index, 3), phase: 'prefill-end' }));
          await step(runner, entries);
          using outside = model.device.tensor('i32', ['token'], [1], Int32Array.of(bad));
          const rows = rowsOf(await step(runner, entries.map(({ sequence }, index) => ({ sequence, ids: index === 40 ? outside : [7 + index], phase: 'decode' }))));
          for (const { sequence } of entries) sequence.dispose();
          return rows;
        };
        const [wanted, rows] = [await decode(9), await decode(-1)];
        const [failing] = rows.splice(40, 1);
        wanted.splice(40, 1);
        expect(failing?.every(Number.isNaN)).toBe(true);
        expect(rows).toHaveLength(63);
        expect(rows).toEqual(wanted);
      },
      undefined,
      64,
    ));

  it('a token that sample could not choose ends its own request, and the runner lives', () =>
    use(async (runner, model) => {
      const [sequence, neighbour] = [await open(runner, 1), await open(runner, 2)];
      using bad = model.device.tensor('i32', ['token'], [1], Int32Array.of(vocabulary));
      const entries: BatchEntry[] = [
        { sequence, ids: bad, phase: 'decode' },
        { sequence: neighbour, ids: [9], phase: 'decode' },
      ];
      using output = model.device.tensor('i32', ['row'], [2]);
      using outcomes = model.device.tensor('i32', ['row'], [2]);
      using logits = await runner.step(entries);
      sample(runner.stream, { logits, settings: [{}, {}], steps: [0, 0], output, outcomes });
      // The next step is enqueued before anybody knows of it.
      const ids = output.view(['token'], [2]);
      const next: BatchEntry[] = [sequence, neighbour].map((each, row) => ({
        sequence: each,
        ids: ids.slice('token', row, row + 1),
        phase: 'decode',
      }));
      const [failing, other] = rowsOf(await step(runner, next));
      expect([...(await outcomes.read())]).toEqual([1, 0]);
      expect(failing?.every(Number.isNaN)).toBe(true);
      expect(other?.every(Number.isFinite)).toBe(true);

      const answer = generateTokens(runner, [5, 6], { sequence, endIds: [] }).next();
      await expect(answer).rejects.toThrow(InvalidValueError);
      await expect(answer).rejects.toThrow(/no token at position .*NaN or infinite/);
      expect(sequence.length).toBe(44);
      sequence.dispose();
      expect(await generateTokens(runner, prompt(3), { maxTokens: 1 }).next()).toHaveProperty('value.finishReason', 'length');
    }));

  /** Keeps two tokens of each head; in layer 2 of prompts of 33 tokens it does `wrong`, until it is mended. */
  let mended = false;
  const selector = (wrong: (keep: (...tokens: number[]) => ReturnType<KvSelector['select']>) => ReturnType<KvSelector['select']>): KvSelector => ({
    name: 'sometimes wrong',
    observationWindow: 4,
    select(stream, { store, slot }) {
      const { kvHeads, index: layer } = store.layer;
      const keep = (...tokens: number[]) => {
        const rows = Int32Array.from({ length: kvHeads * tokens.length }, (_, index) => tokens[index % tokens.length] ?? 0);
        const indices = stream.device.tensor('i32', ['kvHead', 'kept'], [kvHeads, tokens.length], rows);
        return { indices, counts: new Array<number>(kvHeads).fill(tokens.length) };
      };
      return !mended && layer === 2 && store.lengths(slot)[0] === 33 ? wrong(keep) : keep(3, 17);
    },
  });
  const wrongs: [string, Parameters<typeof selector>[0], RegExp][] = [
    ['throws', () => { throw new Error('no idea'); }, /no idea/],
    ['rejects', () => Promise.reject(new Error('no idea later')), /no idea later/],
    ['gives indices that descend', (keep) => keep(9, 4), /sometimes wrong.*layer 2 does not ascend/],
    ['gives an index that the slot does not hold', (keep) => keep(9, 33), /layer 2 does not ascend/],
    ['keeps more than there is', (keep) => keep(...Array.from({ length: 34 }, (_, token) => token)), /keeps 34 tokens/],
  ];
  it.each(wrongs)('a selector that %s ends its own sequence only', (_name, wrong, message) =>
    use(async (runner) => {
      const prompts = [30, 33, 36].map((tokens) => prompt(tokens, tokens));
      const entriesOf = (sequences: readonly Sequence[], all: readonly number[][]): BatchEntry[] =>
        sequences.map((sequence, index) => ({ sequence, ids: all[index] ?? [], phase: 'prefill-end' }));
      const ours = prompts.map(() => runner.openSequence());
      await step(runner, entriesOf(ours, prompts));
      await runner.stream.synchronize();
      const [first, failed, last] = ours as [Sequence, Sequence, Sequence];
      expect(failed.failure?.message).toMatch(message);
      expect(failed.disposed).toBe(true);
      expect(() => { runner.checkTokens(failed, [1]); }).toThrow(DisposedError);
      expect(() => { runner.checkTokens(failed, [1]); }).toThrow(message);

      // The same batch without the error: neighbours have the same bits.
      mended = true;
      const theirs = prompts.map(() => runner.openSequence());
      await step(runner, entriesOf(theirs, prompts));
      mended = false;
      const [wantedFirst, , wantedLast] = theirs as [Sequence, Sequence, Sequence];
      const decode = (sequence: Sequence): BatchEntry => ({ sequence, ids: [5], phase: 'decode' });
      const after = await step(runner, [decode(first), decode(last)]);
      expect(after).toEqual(await step(runner, [decode(wantedFirst), decode(wantedLast)]));

      // Alone it is the error of its prompt.
      const alone = runner.openSequence();
      await expect(prefill(runner, alone, prompts[1] ?? [])).rejects.toThrow(message);
      expect(alone.disposed).toBe(true);
      for (const each of [...ours, ...theirs]) each.dispose();
      await runner.stream.synchronize();
      expect(runner.kvBytes).toEqual({ device: 0, host: 0 });
    }, selector(wrong)),
  );
});
