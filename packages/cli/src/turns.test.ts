import { generateTokens, Model } from '@kv/model';
import type { Runner, Sequence } from '@kv/model';
import { hbw } from '@kv/hbw-select';
import { hieraSparseStore } from '@kv/hierasparse';
import { createDevice, devices, kvPolicy } from '@kv/sparse-core';
import type { KvPolicy } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { createPolicy } from '@kv/policies';
import { needleModel } from './testing/run-kv.js';

const promptOf = (tokens: number, seed: number): number[] =>
  Array.from({ length: tokens }, (_, index) => 3 + (((index + seed) * 7919) % 4000));

describe.each(['cpu', 'cuda'] as const)('several turns on %s', (kind) => {
  async function use(policy: KvPolicy, body: (runner: Runner, sequence: Sequence) => Promise<void>): Promise<void> {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    using runner = model.createRunner({ policy, contextTokens: 2048, maxBatchRows: 256 });
    {
      using sequence = runner.openSequence();
      await body(runner, sequence);
    }
    await runner.stream.synchronize();
    expect(runner.kvBytes).toEqual({ device: 0, host: 0 });
  }

  async function turn(runner: Runner, sequence: Sequence, tokens: number): Promise<void> {
    const before = sequence.length;
    const prompt = promptOf(tokens, before);
    const answer: number[] = [];
    for await (const { id } of generateTokens(runner, prompt, { sequence, maxTokens: 8, endIds: [] })) answer.push(id);
    expect([...sequence.ids].slice(before)).toEqual([...prompt, ...answer]);
  }

  it.skipIf(!devices().includes(kind)).each(['hbw', 'snapkv', 'halo'])(
    'keep with %s a share of all tokens that there were, not of what was kept',
    (method) =>
      use(createPolicy(`${method}-1/4`), async (runner, sequence) => {
        const { layers, kvHeads, headDim } = runner.model.config;
        const blockBytes = 2 * 64 * headDim * 2;
        for (const tokens of [800, 300, 300, 300]) {
          await turn(runner, sequence, tokens);
          const kept = Math.floor((sequence.length - 8) / 4) + 8;
          expect(runner.kvBytes.device).toBe(layers * kvHeads * Math.ceil(kept / 64) * blockBytes);
        }
      }),
  );

  it.skipIf(!devices().includes(kind)).each([
    ['prompts of its own attention', () => createPolicy('hbw-1/4+hierasparse')],
    ['prompts of dense attention', () => kvPolicy({ select: hbw({ keepRatio: 1 / 4 }), store: hieraSparseStore({ keys: 1, values: 1 }) })],
    ['half of the blocks sparse', () => kvPolicy({ select: hbw({ keepRatio: 1 / 2 }), store: hieraSparseStore({ keys: 0.5, values: 0.5, localWindow: 64 }) })],
  ])('go on behind a selection whose blocks are sparse: %s', (_name, policy) =>
    use(policy(), async (runner, sequence) => {
      for (const tokens of [1400, 20, 200, 1]) await turn(runner, sequence, tokens);
    }),
  );
});
