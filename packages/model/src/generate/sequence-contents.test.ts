import { densePagedStore, InvalidValueError, kvPolicy, OutOfMemoryError } from '@kv/sparse-core';
import { expect, it } from 'vitest';

import type { Model } from '../model.js';
import type { Runner } from '../runner/runner.js';
import type { Sequence } from '../runner/sequence.js';
import { needleModel } from '../testing/paths.js';
import { withRunner } from '../testing/run-model.js';
import { describeOnEachKind } from '../testing/test-devices.js';
import { generate } from './generate.js';
import { generateTokens } from './generate-tokens.js';
import type { GenerateTokensOptions } from './generate-tokens.js';
import { prefill } from './prefill.js';

const prompt = Array.from({ length: 70 }, (_, index) => 5 + ((37 * index) % 4000));
const blockTokens = 16;
const policy = kvPolicy({ store: densePagedStore({ dtype: 'f32', blockTokens }) });

interface Ending {
  readonly options?: GenerateTokensOptions;
  /** Called after each token; true leaves the loop. */
  readonly after?: (tokens: number, id: number) => boolean;
  /** The error that the loop ends with. */
  readonly error?: RegExp;
}

/** The tokens that the caller of a loop has seen. */
async function answer(runner: Runner, sequence: Sequence, ending: Ending): Promise<number[]> {
  const seen: number[] = [];
  const loop = async (): Promise<void> => {
    for await (const { id } of generateTokens(runner, prompt, { endIds: [], ...ending.options, sequence })) {
      seen.push(id);
      if (ending.after?.(seen.length, id) === true) break;
    }
  };
  if (ending.error === undefined) await loop();
  else await expect(loop()).rejects.toThrow(ending.error);
  return seen;
}

describeOnEachKind('after an answer its sequence', (kind) => {
  const use = (body: (runner: Runner, model: Model) => Promise<void>, cacheTokens = 512): Promise<void> =>
    withRunner(needleModel, { kind, policy, sequences: 2, contextTokens: 256, cacheTokens }, body);

  /** The sequence is what a fresh one is that reads its tokens: its length, its memory, and the logits behind it. */
  async function expectHolds(
    runner: Runner,
    sequence: Sequence,
    ids: readonly number[],
    other = runner,
  ): Promise<void> {
    expect([...sequence.ids]).toEqual(ids);
    expect(sequence.length).toBe(ids.length);
    const { config } = runner.model;
    const blockBytes = 2 * blockTokens * config.headDim * 4;
    const blocks = config.layers * config.kvHeads * Math.ceil(ids.length / blockTokens);
    expect(runner.kvBytes.device).toBe(blocks * blockBytes);
    using fresh = other.openSequence();
    (await prefill(other, fresh, ids)).dispose();
    const logits = [];
    for (const [reader, each] of [[runner, sequence], [other, fresh]] as const) {
      using row = await reader.step([{ sequence: each, ids: [77], phase: 'decode' }]);
      logits.push(await row.read());
    }
    const [ours = [], wanted = []] = logits;
    // Prompts and answers take other kernels, whose f32 sums run in another order; the logits reach 22.
    expect(Math.max(...wanted.map((value, index) => Math.abs(value - (ours[index] ?? NaN))))).toBeLessThan(1e-3);
  }

  const controller = (): [AbortController, (tokens: number) => boolean] => {
    const aborting = new AbortController();
    return [
      aborting,
      (tokens) => {
        if (tokens === 3) aborting.abort();
        return false;
      },
    ];
  };
  const endings: [string, number, () => Ending][] = [
    ['by length', 5, () => ({ options: { maxTokens: 5 } })],
    ['by length, after one token', 1, () => ({ options: { maxTokens: 1 } })],
    ['by a full context', 186, () => ({})],
    ['by a loop that is left', 3, () => ({ after: (tokens) => tokens === 3 })],
    // The block that the token behind it would have begun is back too.
    ['by a loop that is left at the end of a block', 10, () => ({ after: (tokens) => tokens === 10 })],
    [
      'by an abort between tokens',
      3,
      () => {
        const [{ signal }, after] = controller();
        return { options: { signal }, after, error: /aborted/ };
      },
    ],
  ];
  it.each(endings)('holds the prompt and what was yielded, ended %s', (_how, tokens, ending) =>
    use(async (runner) => {
      using sequence = runner.openSequence();
      const seen = await answer(runner, sequence, ending());
      expect(seen).toHaveLength(tokens);
      if (sequence.length === runner.contextTokens) runner.truncate(sequence, sequence.length - 1);
      await expectHolds(runner, sequence, [...prompt, ...seen].slice(0, runner.contextTokens - 1));
    }),
  );

  it('holds the end token that was yielded', () =>
    use(async (runner) => {
      let third = -1;
      using first = runner.openSequence();
      await answer(runner, first, { options: { maxTokens: 3 }, after: (_tokens, id) => ((third = id), false) });
      first.dispose();
      using sequence = runner.openSequence();
      const seen = await answer(runner, sequence, { options: { endIds: [third] } });
      expect(seen.at(-1)).toBe(third);
      await expectHolds(runner, sequence, [...prompt, ...seen]);
    }));

  it('holds what the caller of generate saw before a stop string', () =>
    use(async (runner, model) => {
      const texts: string[] = [];
      for await (const { text } of generate(runner, model.tokenizer, prompt, { maxTokens: 12, endIds: [] })) texts.push(text);
      const whole = texts.join('');
      using sequence = runner.openSequence();
      const seen: number[] = [];
      const options = { maxTokens: 12, endIds: [], stop: [whole.slice(4, 8)], sequence };
      for await (const { id } of generate(runner, model.tokenizer, prompt, options)) seen.push(id);
      expect(seen.length).toBeLessThan(12);
      await expectHolds(runner, sequence, [...prompt, ...seen]);
    }));

  it('holds what was yielded before the cache was full', () =>
    use(async (runner, model) => {
      using other = runner.openSequence();
      (await prefill(runner, other, prompt.slice(0, 16))).dispose();
      using sequence = runner.openSequence();
      const seen: number[] = [];
      const loop = async (): Promise<void> => {
        for await (const { id } of generateTokens(runner, prompt, { endIds: [], sequence })) seen.push(id);
      };
      await expect(loop()).rejects.toThrow(OutOfMemoryError);
      expect(seen.length).toBeGreaterThan(50);
      other.dispose();
      using second = model.createRunner({ policy, contextTokens: 256, activations: 'f32' });
      await expectHolds(runner, sequence, [...prompt, ...seen], second);
    }, 160));

  it('holds what was read of a prompt that an abort cut off', () =>
    use(async (runner) => {
      using sequence = runner.openSequence();
      const aborting = new AbortController();
      const onProgress = (): void => {
        aborting.abort();
      };
      const options = { chunkTokens: 16, signal: aborting.signal, onProgress };
      expect(await answer(runner, sequence, { options, error: /aborted/ })).toEqual([]);
      expect(sequence.length).toBeLessThan(prompt.length);
      await expectHolds(runner, sequence, prompt.slice(0, sequence.length));
    }));

  it('goes on in a second turn as if it had been read at once', () =>
    use(async (runner) => {
      using sequence = runner.openSequence();
      const first = await answer(runner, sequence, { options: { maxTokens: 4 } });
      const second = await answer(runner, sequence, { options: { maxTokens: 4 } });
      await expectHolds(runner, sequence, [...prompt, ...first, ...prompt, ...second]);
    }));

  it('must have room for a token behind its prompt', () =>
    use(async (runner) => {
      using sequence = runner.openSequence();
      const full = new Array<number>(256).fill(5);
      await expect(generateTokens(runner, full, { sequence }).next()).rejects.toThrow(InvalidValueError);
      expect(sequence.length).toBe(0);
    }));
});

describeOnEachKind('a sequence', (kind) => {
  const use = (body: (runner: Runner, model: Model) => Promise<void>): Promise<void> =>
    withRunner(needleModel, { kind, policy, sequences: 2, contextTokens: 256 }, body);

  it('says -1 for tokens that the device alone knows, until it is told', () =>
    use(async (runner, model) => {
      using sequence = runner.openSequence();
      (await prefill(runner, sequence, prompt)).dispose();
      using ids = model.device.tensor('i32', ['token'], [1], new Int32Array([9]));
      (await runner.step([{ sequence, ids, phase: 'decode' }])).dispose();
      expect([...sequence.ids]).toEqual([...prompt, -1]);
      sequence.setIds(prompt.length, [9]);
      expect([...sequence.ids]).toEqual([...prompt, 9]);
      expect(() => {
        sequence.setIds(prompt.length, [9, 9]);
      }).toThrow(InvalidValueError);
      sequence.ids.fill(0);
      expect([...sequence.ids]).toEqual([...prompt, 9]);
    }));

  it('forgets tokens of an answer, and none of a prompt', () =>
    use(async (runner) => {
      using sequence = runner.openSequence();
      await answer(runner, sequence, { options: { maxTokens: 8 } });
      using fork = runner.fork(sequence);
      runner.truncate(fork, 72);
      expect([...fork.ids]).toEqual([...sequence.ids].slice(0, 72));
      expect(() => {
        runner.truncate(fork, 69);
      }).toThrow(InvalidValueError);
      expect(() => {
        runner.truncate(fork, 73);
      }).toThrow(InvalidValueError);
      runner.truncate(fork, 70);
      expect(fork.length).toBe(70);
    }));
});
