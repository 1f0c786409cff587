import type { SampleSettings } from '@kv/sparse-core';

import { expectWholeNumber } from '../expect-whole-number.js';
import type { Logits } from '../runner/head.js';
import type { Runner } from '../runner/runner.js';
import type { Sequence } from '../runner/sequence.js';
import { prefill } from './prefill.js';
import type { PrefillOptions } from './prefill.js';
import { Sampler } from './sampler.js';

/** `end`: the model ended its answer; `stop`: a stop string appeared; `length`: the limit was reached. */
export type FinishReason = 'end' | 'stop' | 'length';

export interface GenerateTokensOptions extends PrefillOptions {
  /**
   * What the prompt continues. Prompt and answer stay in it, with the token that ended the answer, and its memory
   * is the caller's to return. Default: a new one.
   */
  readonly sequence?: Sequence;
  /** Default: as many as the runner's context has room for, which also limits a larger number. */
  readonly maxTokens?: number;
  /** How tokens are chosen. Default: always the most likely one. */
  readonly sampling?: SampleSettings;
  /** Token ids that end the answer. Default: those of the model. */
  readonly endIds?: readonly number[];
}

export interface GeneratedId {
  readonly id: number;
  /** Since the token before, or for the first one since the call. */
  readonly milliseconds: number;
  /** Set on the last token. */
  readonly finishReason: FinishReason | null;
}

/**
 * Reads a prompt and yields the token ids of an answer as they are chosen. The memory of a sequence that
 * was not given is back when the loop has ended, also by `break`, an error or an abort.
 * @throws InvalidValueError for an empty or over-long prompt, ids outside the vocabulary, or sampling
 *   settings outside their domain
 * @throws the signal's reason when it is aborted
 */
export async function* generateTokens(
  runner: Runner,
  prompt: ArrayLike<number>,
  options: GenerateTokensOptions = {},
): AsyncGenerator<GeneratedId, void> {
  const { config } = runner.model;
  const {
    signal,
    maxTokens = runner.contextTokens,
    endIds = config.eosIds,
    sampling = { temperature: 0 },
  } = options;
  expectWholeNumber('maxTokens', maxTokens, 1, Number.MAX_SAFE_INTEGER);
  signal?.throwIfAborted();
  using sampler = new Sampler(runner.stream, sampling, prompt);
  const { sequence = runner.openSequence() } = options;
  let next: Promise<Logits> | undefined;
  let last = performance.now();
  try {
    let choice = sampler.choose(await prefill(runner, sequence, prompt, options));
    const limit = Math.min(maxTokens, runner.contextTokens - sequence.length + 1);
    for (let count = 1; ; count += 1) {
      // The next step is enqueued before its token is known, so that the device never waits for this thread;
      // the step behind an end token is computed in vain.
      next = count < limit ? runner.step([{ sequence, ids: choice.ids, phase: 'decode' }]) : undefined;
      next?.catch(() => undefined);
      const id = await choice.id;
      signal?.throwIfAborted();
      const now = performance.now();
      const finishReason = endIds.includes(id) ? 'end' : next === undefined ? 'length' : null;
      yield { id, milliseconds: now - last, finishReason };
      if (finishReason !== null || next === undefined) return;
      last = now;
      choice = sampler.choose(await next);
      next = undefined;
    }
  } finally {
    (await next?.catch(() => undefined))?.dispose();
    if (options.sequence === undefined) sequence.dispose();
    await runner.stream.synchronize();
  }
}
