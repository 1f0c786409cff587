import { observing } from '@kv/eval';
import type { Moment } from '@kv/eval';
import { prefill } from '@kv/model';
import type { GenerateOptions, Model, PrefillProgress, Runner, Sequence } from '@kv/model';
import { kvPolicy } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { measureAnswer } from '../measure-answer.js';
import type { MeasuredAnswer } from '../measure-answer.js';
import type { NamedPolicy, Reading } from '../policies.js';
import { PrefillBar } from '../prefill-bar.js';

/** A document and questions about it, as token ids. */
export interface EncodedQuestions {
  /** What all prompts begin with. */
  readonly document: Int32Array;
  /** What each prompt has behind the document. */
  readonly questions: readonly Int32Array[];
  /** What tokenising the document took. */
  readonly seconds: number;
}

/** What one policy made of all the questions, in their order. */
export interface PolicyRun {
  readonly policy: string;
  /** When it selected; undefined when it keeps everything. */
  readonly moment: Moment | undefined;
  readonly answers: readonly MeasuredAnswer[];
}

/** What a question is asked of. */
interface Source {
  readonly sequence: Sequence;
  /** What its forks select; undefined leaves them as they are. */
  readonly select: KvSelector | undefined;
  /** What of the document the forks read themselves. */
  readonly unread: Int32Array;
  /** What reading the rest took, and selecting if that is done. */
  readonly seconds: number;
}

/**
 * Reads a document once and asks every question under every policy, each in a fork of the document.
 * @param policies of this reading
 * @throws what `prefill` and `generate` throw
 */
export async function runReading(
  model: Model,
  reading: Reading,
  policies: readonly NamedPolicy[],
  text: EncodedQuestions,
  maxNewTokens: number,
  { stderr, signal }: CommandContext,
): Promise<PolicyRun[]> {
  const { document, questions } = text;
  using runner = model.createRunner({
    policy: kvPolicy(reading.parts()),
    // The document, what a policy left of it, and a question's fork.
    sequences: 3,
    contextTokens: document.length + Math.max(...questions.map(({ length }) => length)) + maxNewTokens,
  });
  const selections = policies.map(({ name, select }) => ({ name, select: select?.() }));
  const window = Math.max(...selections.map(({ select }) => select?.observationWindow ?? 0));
  using whole = runner.openSequence({ select: observing(window) });
  const started = performance.now();
  {
    using bar = new PrefillBar(stderr, reading.name);
    const onProgress = ({ tokens, total }: PrefillProgress): void => bar.update(tokens, total);
    const options = { endsPrompt: false, onProgress, signal };
    // All but the last token: a policy selects when its prompt ends, so each fork reads that one itself.
    (await prefill(runner, whole, document.subarray(0, -1), options)).dispose();
  }
  const seconds = text.seconds + secondsSince(started);
  const unread = document.subarray(-1);
  const ask = (source: Source): Promise<MeasuredAnswer[]> => askAll(model, runner, text, source, { maxTokens: maxNewTokens, signal });

  const runs: PolicyRun[] = [];
  for (const { name, select } of selections) {
    const aware = await ask({ sequence: whole, select: select ?? observing(0), unread, seconds });
    runs.push({ policy: name, moment: select && 'question-aware', answers: aware });
    if (select === undefined) continue;
    using kept = runner.fork(whole, { select });
    await runner.stream.synchronize();
    const selecting = performance.now();
    (await prefill(runner, kept, unread, { signal })).dispose();
    const selected = seconds + secondsSince(selecting);
    const agnostic = await ask({ sequence: kept, select: undefined, unread: new Int32Array(), seconds: selected });
    runs.push({ policy: name, moment: 'question-agnostic', answers: agnostic });
  }
  return runs;
}

/** Asks every question in a fork of its own. What reading the source took counts as if each were the only one. */
async function askAll(
  model: Model,
  runner: Runner,
  { document, questions, seconds: tokenising }: EncodedQuestions,
  { sequence: source, select, unread, seconds }: Source,
  options: GenerateOptions,
): Promise<MeasuredAnswer[]> {
  const answers: MeasuredAnswer[] = [];
  for (const question of questions) {
    const around = runner.kvBytes;
    using sequence = runner.fork(source, select && { select });
    // A question that is asked alone needs no copy of the document.
    await runner.stream.synchronize();
    const prompt = { ids: Int32Array.from([...unread, ...question]), seconds };
    const stop = ['\n'];
    const endsPrompt = select !== undefined;
    const answer = await measureAnswer(runner, model.tokenizer, prompt, { ...options, sequence, endsPrompt, stop });
    const promptTokens = document.length + question.length;
    answers.push({
      ...answer,
      promptTokens,
      prefillTokensPerSecond: promptTokens / (answer.firstTokenSeconds - tokenising),
      kvBytes: answer.kvBytes - around.device - around.host,
    });
  }
  return answers;
}

function secondsSince(started: number): number {
  return (performance.now() - started) / 1000;
}
