import { evaluateRetrieval, textLoss } from '@kv/eval';
import { hieraSparsePrefill, hieraSparseStore } from '@kv/hierasparse';
import { generateTokens, Model, prefill } from '@kv/model';
import { createDevice, devices, kvPolicy } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { createPolicy } from '@kv/policies';
import { needleModel } from './testing/run-kv.js';

const contextTokens = 16_384;

describe.each(['cpu', 'cuda'] as const)('a runner of sparse prompts on %s', (kind) => {
  it.skipIf(!devices().includes(kind)).each([
    { name: 'hierasparse-v1', share: 1 / 2, rounded: 0 },
    // Of a half dense and sparse blocks of keys and of values are rounded up.
    { name: 'hierasparse-k0.5-v0.5', share: 1 / 2, rounded: 4 },
    { name: 'hierasparse-k1-v1', share: 1, rounded: 0 },
  ])('takes the memory of compressed blocks, for prompt and answer: $name', async ({ name, share, rounded }) => {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    const options = { contextTokens, maxBatchRows: 64 };
    const before = model.device.memory().live;
    using dense = model.createRunner(options);
    const withDense = model.device.memory().live;
    using sparse = model.createRunner({ ...options, policy: createPolicy(name) });
    const withBoth = model.device.memory().live;
    // 4 KiB a token in f16, of which 7 of 16 are saved: all but the eight blocks of 256 that are dense at once.
    const saved = 2 * withDense - before - withBoth;
    expect(saved / (contextTokens * 4096)).toBeGreaterThan(share * (7 / 16) - 8 / 256 - rounded / 512 - 0.001);
    // All else that a runner takes is the same.
    expect(dense.kvReserved.device - sparse.kvReserved.device).toBe(saved);

    const { config } = model;
    const prompt = Int32Array.from({ length: 1000 }, (_, index) => 3 + ((index * 7919) % (config.vocabularySize - 3)));
    const answer = [];
    for await (const { id } of generateTokens(sparse, prompt, { maxTokens: 400, endIds: [] })) answer.push(id);
    expect(answer).toHaveLength(400);
    expect(dense.kvBytes.device + sparse.kvBytes.device).toBe(0);
  });

  it.skipIf(!devices().includes(kind))('reads on behind a prompt, with hieraSparsePrefill({}) or without the same bits', async () => {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    const store = hieraSparseStore({ keys: 1, values: 1, localWindow: 64 });
    const options = { sequences: 3, contextTokens: 640 };
    using without = model.createRunner({ ...options, policy: kvPolicy({ store }) });
    using runner = model.createRunner({ ...options, policy: kvPolicy({ prefill: hieraSparsePrefill({}), store }) });
    const ids = Int32Array.from({ length: 450 }, (_, index) => 3 + ((index * 7919) % (model.config.vocabularySize - 3)));
    const first = async (of: typeof runner) => {
      using sequence = of.openSequence();
      using logits = await prefill(of, sequence, ids);
      return await logits.read();
    };
    expect(await first(runner)).toEqual(await first(without));

    const loss = { contextTokens: 400, chunkTokens: 16 };
    const surprise = await textLoss(runner, ids, loss);
    expect(surprise.tokens).toBe(50);
    expect(await textLoss(without, ids, loss)).toEqual(surprise);
    const example = { id: 'one', task: 'any', length: 450, prompt: ids, documentTokens: 430, answer: ids.subarray(0, 3) };
    const everything = [{ name: 'everything', select: () => undefined }];
    const results = await evaluateRetrieval(runner, example, everything);
    expect(results).toHaveLength(2);
    expect(await evaluateRetrieval(without, example, everything)).toEqual(results);
  });
});
