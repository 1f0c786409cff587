import { readFileSync } from 'node:fs';
import { join } from 'node:path';

import { hierarchicalDeviceBytes, hierarchicalHostBytes, hierarchicalStore } from '@kv/hierarchical-kv';
import { Model, prefill } from '@kv/model';
import type { Runner } from '@kv/model';
import { hostPool, kvPolicy } from '@kv/sparse-core';
import { describeOnDeviceKinds, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';

import { needleModel } from './testing/run-kv.js';

/** Ten thousand of eight at once take ten minutes. */
const completions = Number(process.env.KV_COMPLETIONS ?? 8);
/** Others are other completions. */
const seed = Number(process.env.KV_COMPLETIONS_SEED ?? 14);
const [contextTokens, maxTokens] = [448, 24];
const blocks = { budgetTokens: 160, sinkTokens: 32, localWindow: 32 };

const golden = JSON.parse(readFileSync(join(needleModel, 'golden.json'), 'utf8')) as { prompts: { ids: number[] }[] };
const text = golden.prompts.flatMap(({ ids }) => ids);

/** A text, and prompts that begin with so many of its tokens and go on with their own. They are answered together. */
interface Prompts {
  readonly shared: number[];
  readonly own: readonly { readonly kept: number; readonly rest: number[] }[];
}

/** The likeliest tokens behind prompts. The text is read once, and each prompt is a fork of it. */
async function complete(runner: Runner, { shared, own }: Prompts): Promise<number[][]> {
  const answers: number[][] = own.map(() => []);
  const choose = async (logits: Awaited<ReturnType<Runner['step']>>, first: number) => {
    const scores = await logits.read(runner.stream);
    const [rows, width] = logits.shape;
    logits.dispose();
    for (let row = 0; row < rows; row++) {
      const own = scores.subarray(row * width, (row + 1) * width);
      answers[first + row]?.push(own.indexOf(own.reduce((most, score) => Math.max(most, score))));
    }
  };
  const text = runner.openSequence();
  (await prefill(runner, text, shared)).dispose();
  const sequences = own.map(({ kept }) => runner.fork(text, { tokens: kept }));
  text.dispose();
  for (const [index, sequence] of sequences.entries()) await choose(await prefill(runner, sequence, own[index]?.rest ?? []), index);
  for (let token = 1; token < maxTokens; token++) {
    const entries = sequences.map((sequence, index) => ({ sequence, ids: answers[index]?.slice(-1) ?? [], phase: 'decode' as const }));
    await choose(await runner.step(entries), 0);
  }
  for (const sequence of sequences) sequence.dispose();
  return answers;
}

/** Some tokens that follow each other. */
function piece(random: Random, tokens: number): number[] {
  const start = random.integer(0, text.length - contextTokens);
  return text.slice(start, start + tokens);
}

describeOnDeviceKinds('greedy completions', ({ open }) => {
  it.each([1, 8])('of %i at once are the same with all blocks on the device, and with as few as a step reads', async (sequences) => {
    using model = await Model.open(needleModel, { device: open() });
    const random = new Random(seed);
    const layers = Array.from({ length: model.config.layers }, (_, index) => ({ ...model.config, index }));
    const capacity = { device: model.device, slots: sequences + 1, tokensPerSlot: contextTokens, tokens: (sequences + 1) * contextTokens };
    const runnerOf = async (deviceBytes: number): Promise<Runner> => {
      using pool = await hostPool(model.device, { bytes: hierarchicalHostBytes(blocks, layers, capacity) });
      const policy = kvPolicy({ store: hierarchicalStore({ ...blocks, deviceBytes, hostPool: pool }) });
      return model.createRunner({ policy, contextTokens, sequences: sequences + 1 });
    };
    using all = await runnerOf(Number.MAX_SAFE_INTEGER);
    using few = await runnerOf(hierarchicalDeviceBytes(blocks, layers, capacity, sequences));
    let done = 0;
    for (; done < completions / 2; done += sequences) {
      const shared = piece(random, random.integer(200, contextTokens - maxTokens - 40));
      const own = Array.from({ length: sequences }, () => ({ kept: shared.length - random.integer(0, 64), rest: piece(random, random.integer(1, 40)) }));
      const prompts = { shared, own };
      expect(await complete(few, prompts)).toEqual(await complete(all, prompts));
    }
    console.log(`${done} greedy completions of ${sequences} at once, seed ${seed}: 0 differences`);
  }, 7_200_000);
});
