import type { Runner, Sequence } from '@kv/model';
import { prefill } from '@kv/model';
import type { KvSelector } from '@kv/sparse-core';

import { likeliestTokens } from '../likeliest-tokens.js';
import { observing } from '../observing.js';
import type { EncodedExample } from './examples.js';

/**
 * When the cache is cut down. `question-aware`: at the end of the prompt, the question read. `question-agnostic`: at
 * the end of the document, before any question is known; the question is then read into what is left.
 */
export type Moment = 'question-aware' | 'question-agnostic';

/** A way to cut a cache down, under the name that its results carry. */
export interface SelectionPolicy {
  readonly name: string;
  /** Undefined keeps everything. @param promptTokens of document and question together */
  readonly select: (promptTokens: number) => KvSelector | undefined;
}

/** One example under one policy. */
export interface RetrievalResult {
  readonly id: string;
  readonly task: string;
  readonly length: number;
  readonly policy: string;
  readonly moment: Moment;
  /** Whether greedy decoding answers as it should, in every token. */
  readonly right: boolean;
  /** Bytes of the sequence's cache just after the selection, on device and host. */
  readonly kvBytes: number;
}

export interface RetrievalOptions {
  /** Default: both. */
  readonly moments?: readonly Moment[];
  readonly signal?: AbortSignal;
}

/**
 * Asks an example's question under every policy. Document and question are read once, with the attention of the
 * runner's policy; each policy then selects in a fork, and the answer is read in one step: greedy decoding gives it
 * if and only if every token of it is the likeliest one behind those before.
 * @param runner for at least three sequences of the example's tokens; its own policy's selection is not used
 * @throws QueueFullError, OutOfMemoryError when the runner is too small; the signal's reason when it is aborted
 */
export async function evaluateRetrieval(
  runner: Runner,
  example: EncodedExample,
  policies: readonly SelectionPolicy[],
  { moments = ['question-aware', 'question-agnostic'], signal }: RetrievalOptions = {},
): Promise<RetrievalResult[]> {
  const { id, task, length, prompt, documentTokens } = example;
  const selections = policies.map(({ name, select }) => ({ name, select: select(prompt.length) ?? observing(0) }));
  const window = Math.max(0, ...selections.map(({ select }) => select.observationWindow));
  const read = async (sequence: Sequence, ids: Int32Array): Promise<void> => {
    const logits = await prefill(runner, sequence, ids, { endsPrompt: false, ...(signal && { signal }) });
    logits.dispose();
  };
  using document = runner.openSequence({ select: observing(window) });
  // All but the last token, which each fork reads itself, since a policy selects when its prompt ends.
  await read(document, prompt.subarray(0, documentTokens - 1));
  using asked = runner.fork(document);
  await read(asked, prompt.subarray(documentTokens - 1, prompt.length - 1));
  const results: RetrievalResult[] = [];
  for (const moment of moments) {
    const isAware = moment === 'question-aware';
    for (const { name, select } of selections) {
      signal?.throwIfAborted();
      const around = totalBytes(runner);
      using fork = runner.fork(isAware ? asked : document, { select });
      using logits = await prefill(runner, fork, prompt.subarray(fork.length, fork.length + 1));
      const kvBytes = totalBytes(runner) - around;
      const [next = -1] = await likeliestTokens(runner, logits);
      const right = await answers(runner, fork, example, next);
      results.push({ id, task, length, policy: name, moment, right, kvBytes });
    }
  }
  return results;
}

/** Whether a sequence that has read part of the prompt, behind which `next` is likeliest, gives the answer. */
async function answers(
  runner: Runner,
  sequence: Sequence,
  { prompt, answer }: EncodedExample,
  next: number,
): Promise<boolean> {
  const rest = Int32Array.from([...prompt.subarray(sequence.length), ...answer.subarray(0, -1)]);
  const chosen = [next];
  if (rest.length > 0) {
    using batch = runner.createBatch([{ sequence, ids: rest, phase: 'prefill' }]);
    runner.embed(batch);
    await runner.runLayers(batch, 0, runner.model.config.layers);
    using logits = runner.head(batch, [...rest.keys()]);
    chosen.push(...(await likeliestTokens(runner, logits)));
  }
  return answer.every((id, index) => id === chosen[chosen.length - answer.length + index]);
}

function totalBytes({ kvBytes }: Runner): number {
  return kvBytes.device + kvBytes.host;
}
