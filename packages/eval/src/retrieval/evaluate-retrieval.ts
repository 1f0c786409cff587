import type { Logits, Runner, Sequence } from '@kv/model';
import { prefill } from '@kv/model';
import type { KvSelector } from '@kv/sparse-core';
import { expectBoolean, expectObject, expectOptions, expectSignal, expectThat, listOf } from '@kv/sparse-core/native';

import { expectRunner } from '../expect-given.js';
import { likeliestTokens } from '../likeliest-tokens.js';
import { observing } from '../observing.js';
import { expectExample } from './examples.js';
import type { EncodedExample } from './examples.js';
import { logitDivergence } from './logit-divergence.js';

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
  /**
   * `Σ p ln(p / q)` in nats, the mean over the answer's tokens: p what the whole cache gives behind the prompt and the
   * answer's tokens before, q what this cache gives. Only where `divergence` is asked for.
   */
  readonly divergence?: number | undefined;
}

export interface RetrievalOptions {
  /** Default: both. */
  readonly moments?: readonly Moment[] | undefined;
  /** Whether to measure how far a policy's logits are from those of the whole cache. Default: false. */
  readonly divergence?: boolean | undefined;
  readonly signal?: AbortSignal | undefined;
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
  options: RetrievalOptions = {},
): Promise<RetrievalResult[]> {
  expectRunner('evaluateRetrieval', runner);
  expectExample('evaluateRetrieval', example);
  const { moments, divergence, signal } = checkedOptions(options);
  const { id, task, length, prompt, documentTokens } = example;
  const given = listOf('evaluateRetrieval', 'policies', policies, mostPolicies).map(checkedPolicy);
  const selections = given.map(({ name, select }) => ({ name, select: select(prompt.length) ?? observing(0) }));
  const window = Math.max(0, ...selections.map(({ select }) => select.observationWindow));
  const read = async (sequence: Sequence, ids: Int32Array): Promise<void> => {
    const logits = await prefill(runner, sequence, ids, { endsPrompt: false, signal });
    logits.dispose();
  };
  using document = runner.openSequence({ select: observing(window) });
  // All but the last token, which each fork reads itself, since a policy selects when its prompt ends.
  await read(document, prompt.subarray(0, documentTokens - 1));
  using asked = runner.fork(document);
  await read(asked, prompt.subarray(documentTokens - 1, prompt.length - 1));
  const ask = async (from: Sequence, select: KvSelector): Promise<Asked> => {
    signal?.throwIfAborted();
    using fork = runner.fork(from, { select });
    using logits = await prefill(runner, fork, prompt.subarray(fork.length, fork.length + 1));
    const { device, host } = runner.kvBytesOf(fork);
    return { kvBytes: device + host, ...(await readAnswer(runner, fork, example, logits, divergence)) };
  };
  const whole = divergence ? await ask(asked, observing(0)) : undefined;
  const results: RetrievalResult[] = [];
  for (const moment of moments) {
    for (const { name, select } of selections) {
      const { right, kvBytes, logits } = await ask(moment === 'question-aware' ? asked : document, select);
      const lost = whole && meanDivergence(whole.logits, logits);
      results.push({ id, task, length, policy: name, moment, right, kvBytes, divergence: lost });
    }
  }
  return results;
}

const allMoments: readonly Moment[] = ['question-aware', 'question-agnostic'];
const mostPolicies = 4096;

function checkedOptions(given: RetrievalOptions) {
  expectOptions('evaluateRetrieval', given, { moments: true, divergence: true, signal: true });
  const { moments = allMoments, divergence = false, signal } = given;
  const list = listOf('evaluateRetrieval', 'moments', moments, allMoments.length);
  const known = list.every((moment) => allMoments.includes(moment));
  expectThat('evaluateRetrieval', 'moments', moments, known, `a list of ${allMoments.join(', ')}`);
  expectBoolean('evaluateRetrieval', 'divergence', divergence);
  expectSignal('evaluateRetrieval', signal);
  return { moments: list, divergence, signal };
}

function checkedPolicy(given: SelectionPolicy): SelectionPolicy {
  expectObject('evaluateRetrieval', 'policies', given);
  const fits = typeof given.name === 'string' && typeof given.select === 'function';
  expectThat('evaluateRetrieval', 'policies', given, fits, 'policies with a name and select()');
  return given;
}

interface Answer {
  readonly right: boolean;
  /** `[answer token][vocabulary]` behind the tokens before it; none unless they are wanted. */
  readonly logits: readonly Float32Array[];
}

interface Asked extends Answer {
  readonly kvBytes: number;
}

/**
 * Reads what is left of the prompt, and the answer, into a sequence.
 * @param next `[1, vocabulary]` behind what the sequence has read of the prompt
 */
async function readAnswer(
  runner: Runner,
  sequence: Sequence,
  { prompt, answer }: EncodedExample,
  next: Logits,
  wantsLogits: boolean,
): Promise<Answer> {
  const chosen = [...(await likeliestTokens(runner, next))];
  const rows = wantsLogits ? await readRows(next) : [];
  const rest = Int32Array.from([...prompt.subarray(sequence.length), ...answer.subarray(0, -1)]);
  if (rest.length > 0) {
    using batch = runner.createBatch([{ sequence, ids: rest, phase: 'prefill' }]);
    runner.embed(batch);
    await runner.runLayers(batch, 0, runner.model.config.layers);
    using logits = runner.head(batch, [...rest.keys()]);
    chosen.push(...(await likeliestTokens(runner, logits)));
    if (wantsLogits) rows.push(...(await readRows(logits)));
  }
  // Rows before the last of the prompt foretell the question.
  const right = answer.every((id, index) => id === chosen[chosen.length - answer.length + index]);
  return { right, logits: rows.slice(-answer.length) };
}

async function readRows(logits: Logits): Promise<Float32Array[]> {
  const [rows, vocabulary] = logits.shape;
  const all = await logits.read();
  return Array.from({ length: rows }, (_, row) => all.subarray(row * vocabulary, (row + 1) * vocabulary));
}

function meanDivergence(reference: readonly Float32Array[], given: readonly Float32Array[]): number {
  const each = reference.map((logits, index) => logitDivergence(logits, given[index] ?? new Float32Array()));
  return each.reduce((total, one) => total + one, 0) / each.length;
}
