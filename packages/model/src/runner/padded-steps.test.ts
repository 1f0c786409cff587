import { densePagedStore, kvPolicy } from '@kv/sparse-core';
import type { KvStore, KvStoreFactory } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import { largestDifference } from '../testing/golden.js';
import { needleModel } from '../testing/paths.js';
import { randomNumbers } from '../testing/random-model.js';
import { recordedStep, unrecordedStep, withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import type { BatchEntry } from './batch-entry.js';
import type { Runner } from './runner.js';
import type { Sequence } from './sequence.js';

const vocabulary = 4096;
const sequences = 20;
const contextTokens = 96;

/** One row alone and among others may go through other kernels: a hundredth of the tolerance against the reference. */
const sameLogits = 1e-4;
function randomId(seed: number): Int32Array {
  const random = randomNumbers(seed);
  return Int32Array.of(Math.floor(((random() + 1) / 2) * vocabulary));
}

/** Opens all sequences of a runner and reads a prompt into each. */
async function readAll(runner: Runner): Promise<Sequence[]> {
  const opened: Sequence[] = [];
  for (let index = 0; index < sequences; index += 1) {
    const sequence = runner.openSequence();
    const ids = Int32Array.from({ length: 3 + 2 * index }, (_, token) => (token * 37 + index * 101) % vocabulary);
    (await runner.step([{ sequence, ids, phase: 'prefill-end' }])).dispose();
    opened.push(sequence);
  }
  return opened;
}

/** A batch of `count` sequences, others each time and not in the order of their slots. */
function answers(opened: readonly Sequence[], count: number): BatchEntry[] {
  const turn = (7 * count) % sequences;
  const turned = [...opened.slice(turn), ...opened.slice(0, turn)].reverse().slice(0, count);
  return turned.map((sequence) => ({ sequence, ids: randomId(1000 * count + sequence.slot), phase: 'decode' }));
}

/** A dense store whose layers can be looked at. */
function watched(dtype: 'f32' | 'bf16'): { store: KvStoreFactory; layers: KvStore[] } {
  const dense = densePagedStore({ dtype, blockTokens: 16 });
  const layers: KvStore[] = [];
  const create: KvStoreFactory['create'] = (...args) => {
    const made = dense.create(...args);
    layers.push(...made);
    return made;
  };
  return { store: { name: dense.name, create }, layers };
}

/** What a layer's cache holds: its bytes, and where each slot's next token of each kv head comes. */
async function contents(runner: Runner, layer: KvStore) {
  const blocks = layer.denseBlocks();
  if (blocks === undefined) throw new Error('a dense store');
  const { stream } = runner;
  const [keys, values, table, counts] = await Promise.all([
    blocks.keys.read(stream),
    blocks.values.read(stream),
    blocks.blockTable.read(stream),
    blocks.keyCounts.read(stream),
  ]);
  const [, kvHeads, width] = blocks.blockTable.shape;
  const [, blockTokens, dim] = blocks.keys.shape;
  const place = (slot: number, head: number, token: number): number => {
    const block = table[(slot * kvHeads + head) * width + Math.floor(token / blockTokens)] ?? NaN;
    return block * blockTokens + (token % blockTokens);
  };
  const bytesOf = (array: ArrayBufferView): Buffer => Buffer.from(array.buffer, array.byteOffset, array.byteLength);
  return { keys: bytesOf(keys), values: bytesOf(values), counts: Array.from(counts), kvHeads, place, rows: keys.length / dim };
}

/** Which rows of a pool differ. */
function changed(before: Buffer, after: Buffer, rows: number): number[] {
  const size = before.length / rows;
  const at = (row: number): readonly [number, number] => [row * size, (row + 1) * size];
  return Array.from({ length: rows }, (_, row) => row).filter(
    (row) => !before.subarray(...at(row)).equals(after.subarray(...at(row))),
  );
}

describeOnEachKind('a recorded step that entries without rows fill up', (kind) => {
  const options = { kind, contextTokens, sequences } as const;

  it.each(['f32', 'bf16'] as const)('has the bits of an unrecorded one, for 1 to 20 sequences in %s', async (dtype) => {
    const policy = kvPolicy({ store: densePagedStore({ dtype }) });
    await withRunner(needleModel, { ...options, policy, activations: dtype }, async (runner, model) => {
      using plain = model.createRunner({ contextTokens, sequences, policy, activations: dtype });
      using single = model.createRunner({ contextTokens, sequences, policy, activations: dtype });
      const f32Policy = kvPolicy({ store: densePagedStore({ dtype: 'f32' }) });
      using exact = model.createRunner({ contextTokens, sequences, policy: f32Policy, activations: 'f32' });
      const [ours, theirs, alone] = [await readAll(runner), await readAll(plain), await readAll(single)];
      const inF32 = await readAll(exact);
      // In bf16 a row alone and among others may go through other kernels: two results that are both off by what bf16
      // rounds, which is what a row alone is off from f32.
      let [rounded, apart] = [0, 0];
      const record = runner.stream.record.bind(runner.stream);
      let recordings = 0;
      runner.stream.record = (enqueue) => {
        recordings += 1;
        return record(enqueue);
      };
      for (let count = 1; count <= sequences; count += 1) {
        const logits = await recordedStep(runner, answers(ours, count));
        const wanted = await unrecordedStep(plain, answers(theirs, count));
        expect(logits).toHaveLength(count * vocabulary);
        // cuBLASLt multiplies more than 8 rows, on Hopper more than 16, as their number suits.
        if (kind === 'cpu' || dtype === 'f32' || count <= 8) expect(logits).toEqual(wanted);
        else apart = Math.max(apart, largestDifference(logits, wanted));
        for (const [row, entry] of answers(alone, count).entries()) {
          const one = await recordedStep(single, [entry]);
          const together = logits.subarray(row * vocabulary, (row + 1) * vocabulary);
          if (dtype === 'f32') expect(largestDifference(together, one)).toBeLessThan(sameLogits);
          else apart = Math.max(apart, largestDifference(together, one));
          const [entryInF32] = answers(inF32, count).slice(row, row + 1);
          if (entryInF32) rounded = Math.max(rounded, largestDifference(one, await recordedStep(exact, [entryInF32])));
        }
      }
      if (dtype === 'bf16') expect(apart).toBeLessThan(2 * rounded);
      // Of 1, 2, 4, 8, 16 and 20.
      expect(recordings).toBe(6);
    });
  });

  it('has the bits of an unrecorded one for up to 256 sequences of different lengths', async () => {
    const most = { ...options, sequences: 256 };
    await withRunner(needleModel, most, async (runner, model) => {
      const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32' }) });
      using plain = model.createRunner({ contextTokens, sequences: 256, policy, activations: 'f32' });
      const open = async (of: Runner): Promise<Sequence[]> => {
        const entries = Array.from({ length: 256 }, (_, index): BatchEntry => {
          const ids = Int32Array.from({ length: 1 + (index % 4) }, (_id, token) => (token * 37 + index * 101) % vocabulary);
          return { sequence: of.openSequence(), ids, phase: 'prefill-end' };
        });
        for (let first = 0; first < 256; first += 128) (await of.step(entries.slice(first, first + 128))).dispose();
        return entries.map(({ sequence }) => sequence);
      };
      const [ours, theirs] = [await open(runner), await open(plain)];
      for (const count of [33, 64, 65, 100, 129, 255, 256]) {
        const decode = (sequences: readonly Sequence[]): BatchEntry[] =>
          sequences.slice(256 - count).map((sequence) => ({ sequence, ids: randomId(1000 * count + sequence.slot), phase: 'decode' }));
        const logits = await recordedStep(runner, decode(ours));
        const wanted = await unrecordedStep(plain, decode(theirs));
        expect(logits).toHaveLength(count * vocabulary);
        expect(largestDifference(logits, wanted)).toBeLessThanOrEqual(kind === 'cpu' ? 0 : sameLogits);
      }
    });
  });

  it('writes into the cache what its own entries append, and nothing else', async () => {
    const { store, layers } = watched('f32');
    await withRunner(needleModel, { ...options, policy: kvPolicy({ store }) }, async (runner) => {
      const opened = await readAll(runner);
      const look = () => Promise.all(layers.map((layer) => contents(runner, layer)));
      // Makes the recordings, and their graphs.
      for (const count of [3, 3, 3, 9, 9, 9]) await recordedStep(runner, answers(opened, count));
      for (const count of [3, 9]) {
        const entries = answers(opened, count);
        const slots = entries.map(({ sequence }) => sequence.slot);
        const before = await look();
        await recordedStep(runner, entries);
        const after = await look();
        // The layers share one pool.
        const places: number[] = [];
        for (const [layer, now] of after.entries()) {
          const counts = before[layer]?.counts ?? [];
          const { kvHeads, place } = now;
          for (let head = 0; head < kvHeads; head += 1) {
            places.push(...slots.map((slot) => place(slot, head, counts[slot * kvHeads + head] ?? NaN)));
          }
          expect(now.counts).toEqual(counts.map((tokens, at) => tokens + (slots.includes(Math.floor(at / kvHeads)) ? 1 : 0)));
        }
        places.sort((a, b) => a - b);
        const [then, now] = [before[0], after[0]];
        if (then === undefined || now === undefined) throw new Error('a model of layers');
        expect(changed(then.keys, now.keys, now.rows)).toEqual(places);
        expect(changed(then.values, now.values, now.rows)).toEqual(places);
      }
    });
  });
});
