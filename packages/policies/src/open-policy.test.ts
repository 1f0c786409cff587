import { rm } from 'node:fs/promises';
import { join } from 'node:path';

import { saveCodebooks } from '@kv/hcattn-quant';
import { CapabilityError, createDevice, InvalidValueError, KvError, ModelFormatError } from '@kv/sparse-core';
import { Random, withDirectory } from '@kv/sparse-core/testing';
import { describe, expect, it } from 'vitest';

import { openPolicy } from './open-policy.js';
import { createPolicy, policies } from './policies.js';

const config = { layers: 2, queryHeads: 4, kvHeads: 2, headDim: 64 };
const fingerprint = 'ab'.repeat(32);

/** Random codebooks of 16 centroids that all groups of a head share. */
function codebooks(groups: number) {
  const random = new Random(groups);
  const { layers, kvHeads, headDim } = config;
  const layer = () => ({
    kvHeads,
    centroids: random.elements('f16', (kvHeads * 16 * headDim) / groups),
    scale: new Float32Array(kvHeads * headDim).fill(1),
  });
  return {
    ...{ model: fingerprint, headDim, groups, books: 1, centroids: 16 },
    layers: Array.from({ length: layers }, layer),
    training: { seed: 1, iterations: 1, batchVectors: 1, keys: 1 },
  };
}

describe('openPolicy', () => {
  const device = createDevice({ threads: 1 });
  const modelIn = (directory: string) => ({ device, config, directory, fingerprint: () => Promise.resolve(fingerprint) });
  const withCodebooks = (run: (directory: string) => Promise<void>) =>
    withDirectory({}, async (directory) => {
      for (const groups of [32, 16, 8]) await saveCodebooks(join(directory, `codebooks-${groups}.safetensors`), codebooks(groups));
      await run(directory);
    });

  it.each(policies.map(({ name }) => name))('opens %s, whose stores give back all that it loaded', async (name) => {
    await withCodebooks(async (directory) => {
      const before = device.memory();
      const { policy, ...opened } = await openPolicy(name, modelIn(directory), { contextTokens: 256, sequences: 2 });
      const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
      const capacity = { device, slots: 2, tokensPerSlot: 256, tokens: 512, prefill: policy.prefill };
      const stores = policy.store.create(layers, capacity);
      expect(stores.some((store) => store.reserved().host > 0)).toBe(/hcattn|offload|sparse-2048/.test(name));
      for (const store of stores) store.dispose();
      opened[Symbol.dispose]();
      await device.defaultStream.synchronize();
      expect(device.memory().live).toBe(before.live);
    });
  });

  it('makes what createPolicy does where nothing is to be loaded', async () => {
    const { policy } = await openPolicy('halo-1/4+int4', modelIn('/nowhere'), { contextTokens: 1 });
    expect(policy.name).toBe(createPolicy('halo-1/4+int4').name);
  });

  it('refuses what is no model or no cache, and leaves nothing', async () => {
    await withCodebooks(async (directory) => {
      const [model, cache] = [modelIn(directory), { contextTokens: 256 }];
      const nothing = [undefined, null, 5, 'model', {}];
      const models = [
        ...nothing,
        ...[{ directory: 5 }, { device: {} }, { fingerprint: undefined }, { config: undefined }].map((wrong) => ({ ...model, ...wrong })),
        ...[NaN, -1, 0.5, 1e10, '2'].flatMap((wrong) => [{ layers: wrong }, { headDim: wrong }]).map((wrong) => ({ ...model, config: { ...config, ...wrong } })),
      ];
      for (const wrong of models) await expect(openPolicy('hcattn-1/4', wrong as never, cache)).rejects.toBeInstanceOf(KvError);
      const caches = [...nothing, ...[NaN, 0, 0.5, '9'].flatMap((wrong) => [{ contextTokens: wrong }, { ...cache, sequences: wrong }])];
      for (const wrong of caches) await expect(openPolicy('hcattn-1/4', model, wrong as never)).rejects.toBeInstanceOf(KvError);
      await expect(openPolicy(undefined as never, model, cache)).rejects.toBeInstanceOf(KvError);
      await device.defaultStream.synchronize();
      expect(device.memory().live).toBe(0);
    });
  });

  it('says what is missing, and how it is made', async () => {
    await withCodebooks(async (directory) => {
      const [model, cache] = [modelIn(directory), { contextTokens: 256 }];
      await expect(openPolicy('magic', model, cache)).rejects.toThrow(InvalidValueError);
      const other = { ...model, fingerprint: () => Promise.resolve('cd'.repeat(32)) };
      await expect(openPolicy('hcattn-1/4', other, cache)).rejects.toThrow(ModelFormatError);
      await rm(join(directory, 'codebooks-16.safetensors'));
      const missing = openPolicy('hcattn-1/8', model, cache);
      await expect(missing).rejects.toThrow(CapabilityError);
      await expect(missing).rejects.toThrow(`kv calibrate ${directory} --groups 16 --text FILE --out ${directory}/codebooks-16.safetensors`);
      expect(device.memory().live).toBe(0);
    });
  });
});
