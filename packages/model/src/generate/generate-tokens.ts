import { DisposedError } from '@kv/sparse-core';
import type { SampleSettings } from '@kv/sparse-core';
import { expectIndices, expectObject, listOf, type OptionNames } from '@kv/sparse-core/native';

import { expectRunner } from '../expect-runner.js';
import { expectWholeNumber } from '../expect-whole-number.js';
import type { Logits } from '../runner/head.js';
import type { Runner } from '../runner/runner.js';
import type { Sequence } from '../runner/sequence.js';
import { expectPrefillOptions, prefill, prefillOptions } from './prefill.js';
import type { PrefillOptions } from './prefill.js';
import { Sampler } from './sampler.js';

/** `end`: the model ended its answer; `stop`: a stop string appeared; `length`: the limit was reached. */
export type FinishReason = 'end' | 'stop' | 'length';

export interface GenerateTokensOptions extends PrefillOptions {
  /**
   * What the prompt continues. When the loop has ended, however it ends, it holds the prompt and exactly the tokens
   * that were yielded: `sequence.ids` gives them. Of a prompt whose reading was cut off it holds what was read. Its
   * memory is the caller's to return. Default: a new one.
   */
  readonly sequence?: Sequence | undefined;
  /** Default: as many as the runner's context has room for, which also limits a larger number. At least 1. */
  readonly maxTokens?: number | undefined;
  /** How tokens are chosen. Default: always the most likely one. */
  readonly sampling?: SampleSettings | undefined;
  /** Token ids that end the answer. Default: those of the model. */
  readonly endIds?: readonly number[] | undefined;
}

export const answerOptions: OptionNames<GenerateTokensOptions> = {
  ...{ ...prefillOptions, sequence: true },
  ...{ maxTokens: true, sampling: true, endIds: true },
};

export interface GeneratedId {
  readonly id: number;
  /** Since the token before, or for the first one since the call. */
  readonly milliseconds: number;
  /** Set on the last token. */
  readonly finishReason: FinishReason | null;
}

const mostEndIds = 65_536;

/**
 * Reads a prompt and yields the token ids of an answer as they are chosen. The memory of a sequence that
 * was not given is back when the loop has ended, also by `break`, an error or an abort.
 * @throws InvalidValueError for an empty or over-long prompt, ids outside the vocabulary, or sampling
 *   settings outside their domain; for a sequence of the caller that has no room for a token behind the prompt; when
 *   the model's scores are NaN or infinite
 * @throws the signal's reason when it is aborted
 */
export async function* generateTokens(
  runner: Runner,
  prompt: ArrayLike<number>,
  options: GenerateTokensOptions = {},
): AsyncGenerator<GeneratedId, void> {
  expectRunner('generateTokens', runner);
  expectPrefillOptions('generateTokens', options, answerOptions);
  const { config } = runner.model;
  const {
    maxTokens = runner.contextTokens,
    endIds = config.eosIds,
    sampling = { temperature: 0 },
    sequence: given,
    ...reading
  } = options;
  const { signal } = reading;
  expectWholeNumber('maxTokens', maxTokens, 1, Number.MAX_SAFE_INTEGER);
  expectObject('generateTokens', 'sampling', sampling);
  const ends = listOf('generateTokens', 'endIds', endIds, mostEndIds);
  expectIndices('generateTokens', 'endIds', ends, 2 ** 31);
  signal?.throwIfAborted();
  const { sequence: holder = 'new' } = options;
  // What is not continued need not hold its last token.
  const ids = runner.checkTokens(holder, prompt, given === undefined ? 0 : 1);
  using sampler = new Sampler(runner.stream, sampling, ids);
  const sequence = given ?? runner.openSequence();
  let next: Promise<Logits> | undefined;
  let last = performance.now();
  /** Where the answer begins, and its tokens. */
  let start: number | undefined;
  const yielded: number[] = [];
  let failed = false;
  try {
    let choice = sampler.choose(await prefill(runner, sequence, ids, reading));
    start = sequence.length;
    const room = runner.contextTokens - start + (given === undefined ? 1 : 0);
    const limit = Math.min(maxTokens, room);
    for (;;) {
      const isLast = yielded.length + 1 === limit;
      // The next step is enqueued before its token is known, so that the device never waits for this thread;
      // the step behind an end token is computed in vain.
      const wanted = !isLast || given !== undefined;
      next = wanted ? runner.step([{ sequence, ids: choice.ids, phase: 'decode' }]) : undefined;
      next?.catch(() => undefined);
      const id = await choice.id;
      signal?.throwIfAborted();
      const logits = await next;
      const now = performance.now();
      const finishReason = ends.includes(id) ? 'end' : isLast ? 'length' : null;
      yielded.push(id);
      yield { id, milliseconds: now - last, finishReason };
      if (finishReason !== null || logits === undefined) return;
      last = now;
      next = undefined;
      choice = sampler.choose(logits);
    }
  } catch (error) {
    failed = true;
    // A stream goes with its runner, whose end is what there is to know.
    if (error instanceof DisposedError) runner.assertUsable();
    throw error;
  } finally {
    (await next?.catch(() => undefined))?.dispose();
    if (given === undefined) sequence.dispose();
    else if (start !== undefined && !sequence.disposed) holdExactly(runner, sequence, start, yielded);
    const done = runner.stream.synchronize();
    // That the stream is no more says less than what ended the answer.
    await (failed ? done.catch(() => undefined) : done);
  }
}

/** Takes back a token that was fed before it was known and then never yielded. */
function holdExactly(runner: Runner, sequence: Sequence, start: number, yielded: readonly number[]): void {
  runner.truncate(sequence, Math.min(sequence.length, start + yielded.length));
  sequence.setIds(start, yielded);
}
