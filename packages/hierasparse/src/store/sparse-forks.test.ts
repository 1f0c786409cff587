import { CapabilityError, densePrefill, type KvLayer, OutOfMemoryError, type RowBatchEntry } from '@kv/sparse-core';
import { describeOnDeviceKinds, Random, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import type { Shares } from '../block-sparsity.js';
import { hieraSparsePrefill } from '../hiera-sparse-prefill.js';
import { hieraSparseStore } from '../hiera-sparse-store.js';
import type { KvOperand } from '../blocks-24.js';
import type { HeadOracle } from '../testing/store-oracle.js';
import { StoreRun } from '../testing/store-run.js';

const layer: KvLayer = { index: 0, queryHeads: 2, kvHeads: 1, headDim: 64 };
const [slots, tokensPerSlot, sinkBlocks, localWindow, tokens] = [5, 640, 1, 96, 960];
const [width, blockBytes] = [tokensPerSlot / 64, 2 * 64 * 64 * 2];
const range = (length: number) => Array.from({ length }, (_, index) => index);
const all = range(slots);
const bytesOf = (heads: readonly HeadOracle[]) => heads.reduce((sum, head) => sum + head.bytes(), 0);

interface Sparsity {
  readonly prompt: Shares;
  readonly after: Shares;
}

describeOnDeviceKinds('blocks that sparse forks share', ({ open }: TestDevice) => {
  const entry = (slot: number, rows: number): RowBatchEntry => ({ slot, position: 0, rows });

  /** Losses by the block's place alone, so that the oracle knows them without a sum. */
  function create({ prompt, after }: Sparsity, seed: number) {
    const device = open();
    const random = new Random(seed);
    const losses = { keys: random.permutation(width), values: random.permutation(width) };
    const ofAll = (operand: KvOperand) => Float32Array.from({ length: slots * width }, (_, index) => losses[operand][index % width] ?? 0);
    const prefill = prompt.keys + prompt.values > 0 ? hieraSparsePrefill(prompt) : densePrefill();
    const [store] = hieraSparseStore({
      ...after,
      ...{ sinkTokens: 64 * sinkBlocks, localWindow, dtype: 'f16' },
      blockLoss: (_, operand) => device.tensor('f32', ['slot', 'kvHead', 'block'], [slots, 1, width], ofAll(operand)),
    }).create([layer], { device, slots, tokensPerSlot, tokens, batchRows: 128, prefill });
    if (store === undefined) throw new Error('no store was made');
    const steps = new StoreRun(store, prefill, { device, random, dtype: 'f16', slots, group: 2 });
    const prune = (shares: Shares) => (head: HeadOracle) => {
      if (shares.keys + shares.values === 0) return;
      head.prune(shares, sinkBlocks, localWindow, (operand, block) => losses[operand][block] ?? NaN);
    };
    return { store, steps, random, prune };
  }

  it.each<Sparsity>([
    { prompt: { keys: 0, values: 0 }, after: { keys: 1, values: 1 } },
    { prompt: { keys: 0, values: 1 }, after: { keys: 0, values: 1 } },
    { prompt: { keys: 0, values: 0 }, after: { keys: 0.5, values: 0.25 } },
    { prompt: { keys: 0.5, values: 0.5 }, after: { keys: 0.5, values: 1 } },
    { prompt: { keys: 1, values: 0.25 }, after: { keys: 1, values: 0.5 } },
  ])('hold what a plain model says after 2,000 random operations: $prompt in prompts, $after after', async ({ prompt, after }) => {
    const { store, steps, random, prune } = create({ prompt, after }, 7);
    const finished = new Set<number>();
    const count = (slot: number) => store.lengths(slot)[0] ?? 0;
    const oracle = (slot: number) => steps.heads[slot] ?? [];
    const done = { append: 0, finish: 0, keep: 0, fork: 0, truncate: 0, release: 0, 'no room': 0, 'not cut': 0 };
    const refused = (error: unknown, wanted: typeof OutOfMemoryError | typeof CapabilityError) => {
      expect(error).toBeInstanceOf(wanted);
      done[wanted === OutOfMemoryError ? 'no room' : 'not cut'] += 1;
    };
    const operations = {
      async append(slot: number) {
        const others = all.filter((other) => other !== slot && random.integer(0, 3) === 0);
        const entries = [slot, ...others]
          .map((each) => entry(each, Math.min(tokensPerSlot - count(each), random.pick([1, 1, 20, 70]))))
          .filter(({ rows }) => rows > 0);
        const phase = entries.every(({ rows }) => rows === 1) ? 'decode' : 'prefill';
        if (entries.length === 0) return;
        const before = entries.map(({ slot: each }) => oracle(each).map((head) => head.clone()));
        for (const { slot: each } of entries) oracle(each).forEach(prune(finished.has(each) ? after : prompt));
        const pruned = entries.map(({ slot: each }) => oracle(each).map((head) => head.clone()));
        try {
          await steps.step(entries, phase, phase === 'prefill' ? prune(prompt) : undefined);
          done.append += 1;
        } catch (error) {
          refused(error, OutOfMemoryError);
          // There may have been room to make blocks sparse, but not for the rows.
          entries.forEach(({ slot: each }, index) => {
            const bytes = store.bytes([each]).device;
            const heads = [before[index] ?? [], pruned[index] ?? []];
            steps.heads[each] = heads.find((some) => bytesOf(some) === bytes) ?? [];
          });
        }
      },
      finish(slot: number) {
        try {
          finished.add(slot);
          steps.finishPrefill(slot, prune(after));
          done.finish += 1;
        } catch (error) {
          refused(error, OutOfMemoryError);
        }
      },
      keep(slot: number) {
        const kept = range(count(slot)).filter(() => random.next() < 0.7);
        using indices = steps.stream.device.tensor('i32', ['kvHead', 'kept'], [1, Math.max(1, kept.length)], Int32Array.from(kept.length > 0 ? kept : [0]));
        try {
          store.keep(steps.stream, slot, { indices, counts: [kept.length] });
        } catch (error) {
          refused(error, error instanceof CapabilityError ? CapabilityError : OutOfMemoryError);
          return;
        }
        for (const head of oracle(slot)) head.keep(kept);
        done.keep += 1;
      },
      fork(slot: number) {
        const empty = all.find((other) => count(other) === 0);
        if (empty === undefined || empty === slot) return;
        const dropped = random.integer(0, 1) * random.integer(0, Math.min(count(slot), 100));
        const before = store.bytes().device;
        try {
          steps.copy(slot, empty, dropped);
        } catch (error) {
          refused(error, error instanceof CapabilityError ? CapabilityError : OutOfMemoryError);
          expect(store.bytes().device).toBe(before);
          return;
        }
        // One pair of blocks at most, and what names the others.
        expect(store.bytes().device - before).toBeLessThanOrEqual(blockBytes + 2 * width * 4);
        if (finished.has(slot)) finished.add(empty);
        else finished.delete(empty);
        done.fork += 1;
      },
      truncate(slot: number) {
        const forgotten = random.integer(0, Math.min(count(slot), 100));
        try {
          store.truncate(steps.stream, slot, forgotten);
        } catch (error) {
          refused(error, CapabilityError);
          return;
        }
        for (const head of oracle(slot)) head.truncate(forgotten);
        done.truncate += 1;
      },
      release(slot: number) {
        steps.release(slot);
        finished.delete(slot);
        done.release += 1;
      },
    };
    const mixture = ['append', 'append', 'append', 'append', 'append', 'finish', 'keep', 'fork', 'fork', 'truncate', 'release'] as const;
    for (let step = 1; step <= 2000; step++) {
      await operations[random.pick(mixture)](random.integer(0, slots - 1));
      expect(all.map(count)).toEqual(all.map((slot) => oracle(slot)[0]?.count));
      const bytes = all.map((slot) => store.bytes([slot]).device);
      expect(bytes).toEqual(all.map((slot) => bytesOf(oracle(slot))));
      expect(store.bytes().device).toBeLessThanOrEqual(bytes.reduce((sum, each) => sum + each, 0));
      if (step % 50 === 0) await steps.checkHeld(all.filter((slot) => count(slot) > 0));
    }
    expect(Math.min(...Object.values(done))).toBeGreaterThan(20);
    for (const slot of all) steps.release(slot);
    expect(store.bytes().device).toBe(0);
    // All of the room is there still.
    for (const [slot, chunks] of [[0, 10], [1, 5]] as const) {
      for (let chunk = 0; chunk < chunks; chunk++) await steps.step([entry(slot, 64)], 'prefill', prune(prompt));
    }
    await steps.checkHeld([0, 1]);
    store.dispose();
  });
});
