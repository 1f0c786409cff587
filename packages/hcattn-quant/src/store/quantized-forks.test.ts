import {
  CapabilityError,
  createRowBatch,
  densePrefill,
  type KvCapacity,
  type KvLayer,
  type KvStore,
  OutOfMemoryError,
  type PrefillAttention,
  type RowBatchEntry,
} from '@kv/sparse-core';
import { describeOnDeviceKinds, Random, StoreRun, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { hcAttentionPrefill } from '../hc-attention-prefill.js';
import type { Codec } from '../hc-attention-options.js';
import { hcAttentionStore } from '../hc-attention-store.js';
import type { MissingMass } from '../operations/select-by-mass.js';
import { type BlockOracle, codebookKeys, codedOracle, quantizedOracle } from '../testing/block-oracles.js';
import { codedStores, stagedBytesOf } from '../testing/coded-run.js';
import { HeadOracle } from '../testing/head-oracle.js';

const layer: KvLayer = { index: 0, queryHeads: 2, kvHeads: 1, headDim: 64 };
const [slots, tokensPerSlot, tokens] = [16, 320, 1280];
const denseBytes = 2 * 64 * 64 * 2;
/** Of each kind of store. */
const operationCount = Number(process.env.KV_STORE_OPERATIONS ?? 900);
const all = Array.from({ length: slots }, (_, slot) => slot);
const quantize = (head: HeadOracle) => head.quantize();
const finish = (head: HeadOracle) => {
  head.finished = true;
  head.quantize();
};

interface Options {
  readonly keys: Codec | 'codebooks';
  readonly values: Codec | 'f16';
  readonly sinkTokens: number;
  readonly localWindow: number;
  /** Of codebooks. */
  readonly hostKeys?: boolean | undefined;
  readonly missingMass?: MissingMass | undefined;
}

async function storeOf(capacity: KvCapacity, { keys, values, hostKeys, missingMass, sinkTokens, localWindow }: Options): Promise<{ store: KvStore | undefined; blocks: BlockOracle }> {
  const kept = { sinkTokens, localWindow };
  if (keys === 'codebooks') {
    const settings = { ...kept, hostKeys, missingMass, prefill: capacity.prefill as PrefillAttention, values: values as 'f16' | 'int8', capacity, tau: 1 };
    const { books, stores: [store] } = await codedStores(capacity.device, [layer], settings);
    return { store, blocks: codedOracle(codebookKeys(books, 0), settings) };
  }
  const [store] = hcAttentionStore({ ...kept, keys, values: values as Codec, valuesOn: 'device', dtype: 'f16' }).create([layer], capacity);
  const bits = { keys: keys === 'int8' ? 8 : 4, values: values === 'int8' ? 8 : 4 } as const;
  return { store, blocks: quantizedOracle(64, bits) };
}

describeOnDeviceKinds('blocks that quantized forks share', ({ open }: TestDevice) => {
  const entry = (slot: number, rows: number): RowBatchEntry => ({ slot, position: 0, rows });

  it.each([
    { keys: 'int8', values: 'int8', sinkTokens: 0, localWindow: 0, prompts: 'as they are read' },
    { keys: 'int4', values: 'int8', sinkTokens: 64, localWindow: 32, prompts: 'as they are read' },
    { keys: 'int8', values: 'int4', sinkTokens: 0, localWindow: 64, prompts: 'at their end' },
    { keys: 'int4', values: 'int4', sinkTokens: 64, localWindow: 0, prompts: 'at their end' },
    { keys: 'codebooks', values: 'f16', sinkTokens: 0, localWindow: 32, missingMass: 'meanValue', prompts: 'as they are read' },
    { keys: 'codebooks', values: 'int8', sinkTokens: 64, localWindow: 0, hostKeys: true, prompts: 'at their end' },
  ] as const)('hold what a plain model says after random operations: $keys, $values, $sinkTokens, $localWindow, prompts $prompts', async (options) => {
    const device = open();
    const random = new Random(7);
    const streamed = options.prompts === 'as they are read';
    const prefill = streamed ? hcAttentionPrefill() : densePrefill();
    const capacity = { device, slots, tokensPerSlot, tokens, batchRows: 512, prefill };
    const { store, blocks } = await storeOf(capacity, options);
    if (store === undefined) throw new Error('no store was made');
    const stagedBytes = options.keys === 'codebooks' ? stagedBytesOf(prefill, { hostKeys: 'hostKeys' in options, values: options.values }) : undefined;
    const head = { dtype: 'f16', headDim: 64, blocks, stagedBytes, sinkBlocks: options.sinkTokens / 64, localWindow: options.localWindow } as const;
    const steps = new StoreRun(store, prefill, { device, random, dtype: 'f16', slots, group: 2, roundings: 4 }, () => new HeadOracle(head));
    const finished = new Set<number>();
    const count = (slot: number) => store.lengths(slot)[0] ?? 0;
    const oracle = (slot: number) => steps.heads[slot] ?? [];
    const settle = (slot: number) => {
      if (streamed || finished.has(slot)) oracle(slot).forEach(quantize);
    };
    const done = { append: 0, abort: 0, finish: 0, keep: 0, fork: 0, truncate: 0, release: 0, 'no room': 0, 'not kept': 0 };
    const rowsOf = (slot: number) => Math.min(tokensPerSlot - count(slot), random.pick([1, 1, 20, 70, 130]));
    const batchOf = (slot: number) => {
      const others = all.filter((other) => other !== slot && random.integer(0, 15) === 0);
      return [slot, ...others].map((each) => entry(each, rowsOf(each))).filter(({ rows }) => rows > 0);
    };
    const operations = {
      async append(slot: number) {
        const entries = batchOf(slot);
        if (entries.length === 0) return;
        const phase = entries.every(({ slot: each, rows }) => rows === 1 && (streamed || finished.has(each))) ? 'decode' : 'prefill';
        const before = entries.map(({ slot: each }) => oracle(each).map((one) => one.clone()));
        for (const { slot: each } of entries) settle(each);
        const settled = entries.map(({ slot: each }) => oracle(each).map((one) => one.clone()));
        try {
          await steps.step(entries, phase);
          if (phase === 'prefill') {
            // Dense attention passes the store by where nothing is quantized yet.
            const attended = streamed || entries.some(({ slot: each }) => store.denseBlocks([each]) === undefined);
            if (attended) for (const { slot: each } of entries) settle(each);
          }
          done.append += 1;
        } catch (error) {
          expect(error).toBeInstanceOf(OutOfMemoryError);
          done['no room'] += 1;
          // There may have been room to quantize, but not for the rows.
          entries.forEach(({ slot: each }, index) => {
            const bytes = store.bytes([each]).device;
            const heads = [before[index] ?? [], settled[index] ?? []];
            steps.heads[each] = heads.find(([one]) => one?.bytes().device === bytes) ?? [];
          });
        }
      },
      abort(slot: number) {
        const entries = batchOf(slot);
        if (entries.length === 0) return;
        using batch = createRowBatch(device, steps.stream, entries);
        try {
          store.prepare(steps.stream, batch);
        } catch (error) {
          expect(error).toBeInstanceOf(OutOfMemoryError);
          done['no room'] += 1;
        }
        for (const { slot: each } of entries) {
          store.truncate(steps.stream, each, 0);
          settle(each);
        }
        done.abort += 1;
      },
      finish(slot: number) {
        finished.add(slot);
        steps.finishPrefill(slot, finish);
        done.finish += 1;
      },
      keep(slot: number) {
        const kept = Array.from({ length: count(slot) }, (_, token) => token).filter(() => random.next() < 0.7);
        using indices = device.tensor('i32', ['kvHead', 'kept'], [1, Math.max(1, kept.length)], Int32Array.from(kept.length > 0 ? kept : [0]));
        try {
          store.keep(steps.stream, slot, { indices, counts: [kept.length] });
        } catch (error) {
          expect(error).toBeInstanceOf(error instanceof CapabilityError ? CapabilityError : OutOfMemoryError);
          done[error instanceof CapabilityError ? 'not kept' : 'no room'] += 1;
          return;
        }
        for (const one of oracle(slot)) one.keep(kept);
        done.keep += 1;
      },
      fork(slot: number) {
        const empty = all.find((other) => count(other) === 0);
        if (empty === undefined || empty === slot) return;
        const dropped = random.integer(0, 1) * random.integer(0, count(slot));
        const before = store.bytes().device;
        try {
          steps.copy(slot, empty, dropped);
        } catch (error) {
          expect(error).toBeInstanceOf(OutOfMemoryError);
          expect(store.bytes().device).toBe(before);
          done['no room'] += 1;
          return;
        }
        // One dense block at most.
        expect(store.bytes().device - before).toBeLessThanOrEqual(denseBytes);
        if (finished.has(slot)) finished.add(empty);
        else finished.delete(empty);
        done.fork += 1;
      },
      truncate(slot: number) {
        const forgotten = random.integer(0, Math.min(count(slot), 150));
        store.truncate(steps.stream, slot, forgotten);
        for (const one of oracle(slot)) one.truncate(forgotten);
        done.truncate += 1;
      },
      release(slot: number) {
        steps.release(slot);
        finished.delete(slot);
        done.release += 1;
      },
    };
    const mixture = ['append', 'append', 'append', 'append', 'append', 'abort', 'finish', 'keep', 'fork', 'fork', 'truncate', 'release'] as const;
    for (let step = 1; step <= operationCount; step++) {
      await operations[random.pick(mixture)](random.integer(0, slots - 1));
      expect(all.map(count)).toEqual(all.map((slot) => oracle(slot)[0]?.count));
      const bytes = all.map((slot) => store.bytes([slot]));
      expect(bytes).toEqual(all.map((slot) => oracle(slot)[0]?.bytes()));
      expect(store.bytes().device).toBeLessThanOrEqual(bytes.reduce((sum, { device: each }) => sum + each, 0));
      if (step % 100 === 0) await steps.checkHeld(all.filter((slot) => count(slot) > 0));
    }
    expect(Math.min(...Object.values(done))).toBeGreaterThan(10);
    for (const slot of all) steps.release(slot);
    expect(store.bytes().device).toBe(0);
    // All of the room is there still.
    finished.clear();
    for (let slot = 0; slot < tokens / tokensPerSlot; slot++) {
      await steps.step([entry(slot, tokensPerSlot)], 'prefill');
      finished.add(slot);
      steps.finishPrefill(slot, finish);
    }
    await steps.checkHeld([0, 1, 3]);
    store.dispose();
  });
});
