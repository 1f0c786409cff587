import { halo, hbw, snapKv } from '@kv/hbw-select';
import { hcAttentionStore } from '@kv/hcattn-quant';
import { hieraSparseStore } from '@kv/hierasparse';
import { generateTokens, Model, prefill } from '@kv/model';
import type { Runner, Sequence } from '@kv/model';
import { skeletonPrefill } from '@kv/skeleton-prefill';
import { CapabilityError, createDevice, densePagedStore, devices, kvPolicy } from '@kv/sparse-core';
import type { FloatDType, KvPolicyParts, PrefillReport } from '@kv/sparse-core';
import { describe, expect, it } from 'vitest';

import { needleModel } from './testing/run-kv.js';

const promptOf = (length: number): Int32Array => Int32Array.from({ length }, (_, index) => 3 + ((index * 7919) % 4000));

/** docs/methods/skeleton-prefill.md has a table of what goes behind prompts of this method; here is a test for each of its rows. */
describe.each(['cpu', 'cuda'] as const)('behind skeleton prompts on %s', (kind) => {
  const onDevice = it.skipIf(!devices().includes(kind));
  // On CUDA only longer prompts are worth an estimate.
  const tokens = kind === 'cuda' ? 8192 : 2048;
  const half = { budget: 1 / 2, samples: 500 };

  async function use(parts: KvPolicyParts, body: (runner: Runner, sequence: Sequence) => Promise<void>): Promise<void> {
    using model = await Model.open(needleModel, { device: createDevice({ kind, threads: 2 }) });
    const policy = kvPolicy({ prefill: skeletonPrefill(half), ...parts });
    using runner = model.createRunner({ policy, contextTokens: tokens + 512, sequences: 2, maxBatchRows: tokens });
    using sequence = runner.openSequence();
    await body(runner, sequence);
  }

  /** Reads a prompt and answers; the report of the prompt's attention. */
  async function read(runner: Runner, sequence: Sequence, length: number): Promise<PrefillReport | undefined> {
    const before = sequence.length;
    const reports: PrefillReport[] = [];
    const onReport = (report: PrefillReport): void => void reports.push(report);
    const answer: number[] = [];
    const options = { sequence, maxTokens: 4, endIds: [], onReport };
    for await (const { id } of generateTokens(runner, promptOf(length), options)) answer.push(id);
    expect(sequence.length).toBe(before + length + 4);
    return reports[0];
  }

  const expectSparse = (report: PrefillReport | undefined): void => {
    expect(report?.fallback).toBeUndefined();
    expect(report?.density).toBeCloseTo(half.budget, 2);
  };

  onDevice.each<FloatDType>(['f32', 'f16', 'bf16'])('go dense blocks of %s', (dtype) =>
    use({ store: densePagedStore({ dtype }) }, async (runner, sequence) => {
      expectSparse(await read(runner, sequence, tokens));
      expect((await read(runner, sequence, 3))?.density).toBe(1);
    }),
  );

  onDevice.each([['hbw', hbw], ['snapkv', snapKv], ['halo', halo]] as const)('goes a selection: %s', (_name, select) =>
    use({ select: select({ keepRatio: 1 / 4 }) }, async (runner, sequence) => {
      const { layers, kvHeads, headDim } = runner.model.config;
      expectSparse(await read(runner, sequence, tokens));
      const blockBytes = 2 * 64 * headDim * 2;
      expect(runner.kvBytesOf(sequence).device).toBe(layers * kvHeads * Math.ceil((tokens / 4 + 4) / 64) * blockBytes);
      expect(await read(runner, sequence, 200)).toMatchObject({ density: 1, fallback: 'tokens of the sequence were dropped' });
    }),
  );

  onDevice('go blocks that become sparse at the prompt\'s end; a prompt behind these is refused by name', () =>
    use({ store: hieraSparseStore({ keys: 1, values: 1, localWindow: 64 }) }, async (runner, sequence) => {
      expectSparse(await read(runner, sequence, tokens));
      const { layers, kvHeads, headDim } = runner.model.config;
      expect(runner.kvBytesOf(sequence).device).toBeLessThan((layers * kvHeads * tokens * headDim * 4) / 1.5);
      const again = read(runner, sequence, 200);
      await expect(again).rejects.toThrow(CapabilityError);
      await expect(again).rejects.toThrow(/skeleton 0\.5.*hierasparse/);
    }),
  );

  onDevice.each(['int8', 'int4'] as const)('go blocks that become codes at the prompt\'s end: %s; a prompt behind these is refused by name', (codec) =>
    use({ store: hcAttentionStore({ keys: codec, values: codec, valuesOn: 'device' }) }, async (runner, sequence) => {
      expectSparse(await read(runner, sequence, tokens));
      const { layers, kvHeads, headDim } = runner.model.config;
      const dense = layers * kvHeads * tokens * headDim * 4;
      expect(runner.kvBytesOf(sequence).device).toBeLessThan(codec === 'int8' ? dense / 1.7 : dense / 2.8);
      const again = read(runner, sequence, 200);
      await expect(again).rejects.toThrow(CapabilityError);
      await expect(again).rejects.toThrow(/skeleton 0\.5.*hcattn/);
    }),
  );

  onDevice('goes a selection whose blocks become codes', () =>
    use({ select: halo({ keepRatio: 1 / 4 }), store: hcAttentionStore({ keys: 'int4', values: 'int4', valuesOn: 'device' }) }, async (runner, sequence) => {
      expectSparse(await read(runner, sequence, tokens));
    }),
  );

  onDevice('goes a selection whose blocks become sparse', () =>
    use({ select: hbw({ keepRatio: 1 / 4 }), store: hieraSparseStore({ keys: 1, values: 1 }) }, async (runner, sequence) => {
      expectSparse(await read(runner, sequence, tokens));
    }),
  );

  onDevice('goes a fork, amid a prompt too, as a prompt of its own', () =>
    use({}, async (runner, sequence) => {
      const ids = promptOf(tokens);
      const logitsOf = async (of: Sequence, from: number) => {
        using logits = await prefill(runner, of, ids.subarray(from));
        return await logits.read();
      };
      (await prefill(runner, sequence, ids.subarray(0, tokens - 548), { endsPrompt: false })).dispose();
      using fork = runner.fork(sequence);
      expect(await logitsOf(fork, tokens - 548)).toEqual(await logitsOf(sequence, tokens - 548));
    }),
  );
});
