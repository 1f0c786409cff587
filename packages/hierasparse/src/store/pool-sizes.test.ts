import { densePagedStore, type KvLayer, type KvStore, type KvStoreFactory, OutOfMemoryError } from '@kv/sparse-core';
import { describeOnDeviceKinds, Random, type TestDevice } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import type { BlockSparsity } from '../block-sparsity.js';
import { hieraSparsePrefill } from '../hiera-sparse-prefill.js';
import { hieraSparseStore } from '../hiera-sparse-store.js';
import type { HeadOracle } from '../testing/store-oracle.js';
import { StoreRun } from '../testing/store-run.js';

const layer: KvLayer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };
const range = (length: number) => Array.from({ length }, (_, index) => index);

describeOnDeviceKinds('pools', ({ open }: TestDevice) => {
  it.each([
    { sparsity: { keys: 1, values: 1 }, equation6: 1.778 },
    { sparsity: { keys: 0.5, values: 1 }, equation6: 1.488 },
    { sparsity: { keys: 0.5, values: 0.5 }, equation6: 1.28 },
    { sparsity: { values: 1 }, equation6: 1.28 },
  ])('reserve the bytes of compressed blocks: $sparsity', async ({ sparsity, equation6 }) => {
    const tokens = 65_536;
    const layers = [layer, { ...layer, index: 1 }];
    const prefill = hieraSparsePrefill(sparsity);
    const reserved = async (factory: KvStoreFactory) => {
      const device = open();
      const capacity = { device, slots: 1, tokensPerSlot: tokens, tokens, batchRows: 512, prefill };
      const before = device.memory().live;
      const stores = factory.create(layers, capacity);
      const bytes = device.memory().live - before;
      expect(stores.reduce((sum, store) => sum + store.reserved().device, 0)).toBe(bytes);
      for (const store of stores) store.dispose();
      await device.defaultStream.synchronize();
      expect(device.memory().live).toBe(before);
      return bytes;
    };
    const ratio = (await reserved(densePagedStore())) / (await reserved(hieraSparseStore(sparsity)));
    // Of 1,024 blocks six stay outside the range of prunings, nine are those of a step, and of two shares four round.
    expect(ratio).toBeLessThan(equation6);
    expect(ratio).toBeGreaterThan(equation6 * (1 - 0.045));
  });

  it.each([
    { prompt: { keys: 1, values: 1 }, after: { keys: 1, values: 1 } },
    { prompt: { values: 1 }, after: { keys: 1, values: 1 } },
    { prompt: { keys: 0.5, values: 0.25 }, after: { keys: 0.5, values: 1 } },
    { prompt: {}, after: { keys: 0.5, values: 1 } },
  ] satisfies { prompt: BlockSparsity; after: BlockSparsity }[])(
    'have room for all tokens, in small chunks and long answers: $prompt in prompts, $after after',
    async ({ prompt, after }) => {
      const device = open();
      const [tokens, batchRows, localWindow, slots] = [512, 64, 128, 2];
      const prefill = hieraSparsePrefill(prompt);
      const factory = hieraSparseStore({ ...after, localWindow, dtype: 'f16' });
      const capacity = { device, slots, tokensPerSlot: tokens, tokens, batchRows, prefill };
      const [store] = factory.create([layer], capacity) as [KvStore];
      const steps = new StoreRun(store, prefill, { device, random: new Random(5), dtype: 'f16', slots, group: 2 });
      const pruneTo =
        ({ keys = 0, values = 0 }: BlockSparsity) =>
        (head: HeadOracle) => {
          head.prune({ keys: Number(keys), values: Number(values) }, 1, localWindow);
        };
      const entry = (slot: number, position: number, rows: number) => [{ slot, position, rows }];
      for (const chunk of range(5)) await steps.step(entry(0, 60 * chunk, 60), 'prefill', pruneTo(prompt));
      await steps.check(entry(0, 300, 60), 'prefill', pruneTo(prompt));
      steps.finishPrefill(0, pruneTo(after));
      for (const position of range(tokens).slice(360, -1)) {
        await steps.step(entry(0, position, 1), 'decode', pruneTo(after));
      }
      await steps.check(entry(0, tokens - 1, 1), 'decode', pruneTo(after));
      expect(store.bytes().device).toBe(steps.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));
      const beyond = async () => {
        for (const chunk of range(8)) await steps.step(entry(1, batchRows * chunk, batchRows), 'prefill');
      };
      await expect(beyond()).rejects.toThrow(OutOfMemoryError);
      expect(store.lengths(0)).toEqual([tokens, tokens]);
    },
  );

  it('serve layers of different sparsity', async () => {
    const device = open();
    const [tokens, localWindow] = [640, 64];
    const shares = [
      { prompt: { keys: 0, values: 0 }, after: { keys: 0, values: 0 } },
      { prompt: { keys: 0, values: 0 }, after: { keys: 0.5, values: 1 } },
      { prompt: { keys: 0.25, values: 1 }, after: { keys: 0.25, values: 1 } },
      { prompt: { keys: 1, values: 0 }, after: { keys: 1, values: 0.5 } },
    ] as const;
    const of = (when: 'prompt' | 'after') => ({
      keys: (index: number) => shares[index]?.[when].keys ?? 0,
      values: (index: number) => shares[index]?.[when].values ?? 0,
    });
    const prefill = hieraSparsePrefill(of('prompt'));
    const factory = hieraSparseStore({ ...of('after'), localWindow, dtype: 'f16' });
    const layers = shares.map((_, index) => ({ ...layer, index }));
    const stores = factory.create(layers, { device, slots: 1, tokensPerSlot: tokens, tokens, batchRows: 320, prefill });
    const runs = stores.map(
      (store) => new StoreRun(store, prefill, { device, random: new Random(6), dtype: 'f16', slots: 1, group: 2 }),
    );
    for (const [index, { prompt, after }] of shares.entries()) {
      const steps = runs[index];
      const pruneTo = (to: typeof prompt | typeof after) => (head: HeadOracle) => {
        head.prune(to, 1, localWindow);
      };
      for (const position of [0, 300]) {
        await steps?.check([{ slot: 0, position, rows: 300 }], 'prefill', pruneTo(prompt));
      }
      steps?.finishPrefill(0, pruneTo(after));
      for (const position of range(tokens).slice(600)) {
        await steps?.step([{ slot: 0, position, rows: 1 }], 'decode', pruneTo(after));
      }
      expect(steps?.store.bytes().device).toBe(steps?.heads.flat().reduce((sum, head) => sum + head.bytes(), 0));
    }
  });
});
