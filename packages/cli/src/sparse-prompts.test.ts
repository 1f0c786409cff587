import { hieraSparsePrefill, hieraSparseStore } from '@kv/hierasparse';
import { generateTokens, Model } from '@kv/model';
import { createDevice, devices, kvPolicy } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { needleModel } from './testing/run-kv.js';

const all = { keys: 1, values: 1 };
const policy = kvPolicy({ prefill: hieraSparsePrefill(all), store: hieraSparseStore(all) });
const contextTokens = 16_384;

describe.each(['cpu', 'cuda'] as const)('a runner of sparse prompts on %s', (kind) => {
  it.skipIf(!devices().includes(kind))('takes the memory of compressed blocks, for prompt and answer', async () => {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    const options = { contextTokens, maxBatchRows: 64 };
    const marks = [model.device.memory().live];
    using dense = model.createRunner(options);
    marks.push(model.device.memory().live);
    using sparse = model.createRunner({ ...options, policy });
    marks.push(model.device.memory().live);
    const [before = 0, withDense = 0, withBoth = 0] = marks;
    // 4 KiB a token in f16, of which 7 of 16 are saved: all but the eight blocks of 256 that are dense at once.
    const saved = 2 * withDense - before - withBoth;
    expect(saved / (contextTokens * 4096)).toBeGreaterThan(7 / 16 - 8 / 256 - 0.001);

    const { config } = model;
    const prompt = Int32Array.from({ length: 1000 }, (_, index) => 3 + ((index * 7919) % (config.vocabularySize - 3)));
    const answer = [];
    for await (const { id } of generateTokens(sparse, prompt, { maxTokens: 400, endIds: [] })) answer.push(id);
    expect(answer).toHaveLength(400);
    expect(dense.kvBytes.device + sparse.kvBytes.device).toBe(0);
  });
});
