import { observing } from '@kv/eval';
import type { Moment } from '@kv/eval';
import { prefill } from '@kv/model';
import type { Model, PrefillProgress, Runner, Sequence } from '@kv/model';
import { kvPolicy } from '@kv/sparse-core';
import type { KvBytes, KvSelector, PrefillReport } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { measureAnswer } from '../measure-answer.js';
import type { MeasuredAnswer, MeasureOptions } from '../measure-answer.js';
import { openReading } from '@kv/policies';
import type { NamedPolicy, Reading } from '@kv/policies';
import { PrefillBar } from '../prefill-bar.js';

/** A document and questions about it, as token ids. */
export interface EncodedQuestions {
  /** What all prompts begin with. */
  readonly document: Int32Array;
  /** What each prompt has behind the document. */
  readonly questions: readonly Int32Array[];
}

/** An answer, and what the cache held at its end. */
export type HeldAnswer = Pick<MeasuredAnswer, 'text' | 'kvBytes'>;

/** What one policy made of all the questions, in their order. */
export interface PolicyRun {
  readonly policy: string;
  /** When it selected; undefined when it keeps everything. */
  readonly moment: Moment | undefined;
  readonly answers: readonly HeldAnswer[];
  /** What the cache took for the document and a fork of it. */
  readonly reservedBytes: KvBytes;
  /** The share of the document's attention that was computed; undefined where the method could not tell. */
  readonly density: number | undefined;
  /** Why the method computed more than it chooses, where it did. */
  readonly fallback: string | undefined;
}

/**
 * Reads a document once and asks every question under every policy, each in a fork of the document.
 * @param policies of this reading
 * @param moments when those that drop tokens do so
 * @throws what `prefill` and `generate` throw
 */
export async function runReading(
  model: Model,
  reading: Reading,
  policies: readonly NamedPolicy[],
  moments: readonly Moment[],
  text: EncodedQuestions,
  maxNewTokens: number,
  { stderr, signal }: CommandContext,
): Promise<PolicyRun[]> {
  const { document, questions } = text;
  const room = {
    // The document and a question's fork.
    sequences: 2,
    contextTokens: document.length + Math.max(...questions.map(({ length }) => length)) + maxNewTokens,
  };
  using opened = await openReading(reading, model, room);
  using runner = model.createRunner({ policy: kvPolicy(opened.parts), ...room });
  const selections = policies.map(({ name, select }) => ({ name, select: select?.() }));
  const window = Math.max(...selections.map(({ select }) => select?.observationWindow ?? 0));
  using whole = runner.openSequence({ select: observing(window) });
  let report: PrefillReport | undefined;
  {
    using bar = new PrefillBar(stderr, reading.name);
    const onProgress = ({ tokens, total }: PrefillProgress): void => bar.update(tokens, total);
    const onReport = (reported: PrefillReport): void => void (report = reported);
    const options = { endsPrompt: false, onProgress, onReport, signal };
    // All but the last token: a policy selects when its prompt ends, so each fork reads that one itself.
    (await prefill(runner, whole, document.subarray(0, -1), options)).dispose();
  }
  const unread = document.subarray(-1);

  const ask = async (question: Int32Array, select: KvSelector | undefined, moment: Moment | undefined): Promise<HeldAnswer> => {
    using sequence = runner.fork(whole, { select: select ?? observing(0) });
    const options = { sequence, maxTokens: maxNewTokens, stop: ['\n'], signal };
    const { text: answer, kvBytes } =
      moment === 'question-agnostic'
        ? await askAfterSelection(model, runner, unread, question, options)
        : await measureAnswer(runner, model.tokenizer, join(unread, question), options);
    return { text: answer, kvBytes };
  };

  const reservedBytes = runner.kvReserved;
  const runs: PolicyRun[] = [];
  for (const { name, select } of selections) {
    for (const moment of select === undefined ? [undefined] : moments) {
      const answers: HeldAnswer[] = [];
      for (const question of questions) answers.push(await ask(question, select, moment));
      runs.push({ policy: name, moment, answers, reservedBytes, density: report?.density, fallback: report?.fallback });
    }
  }
  return runs;
}

/** Ends the document with its last token, so that the policy selects, and asks of what is left. */
async function askAfterSelection(
  model: Model,
  runner: Runner,
  unread: Int32Array,
  question: Int32Array,
  options: MeasureOptions & { readonly sequence: Sequence },
): Promise<MeasuredAnswer> {
  (await prefill(runner, options.sequence, unread, { signal: options.signal })).dispose();
  return await measureAnswer(runner, model.tokenizer, question, { ...options, endsPrompt: false });
}

function join(one: Int32Array, other: Int32Array): Int32Array {
  return Int32Array.from([...one, ...other]);
}
