import type { Model } from '@kv/model';
import { InvalidValueError } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { renderCompareTable } from '../compare/compare-table.js';
import type { PolicyRun } from '../compare/compare-table.js';
import { readQuestions } from '../compare/questions.js';
import type { Question } from '../compare/questions.js';
import { describeDevice } from '../describe-device.js';
import { formatCount } from '../format.js';
import { measureAnswer } from '../measure-answer.js';
import type { MeasuredAnswer } from '../measure-answer.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { policies } from '../policies.js';
import type { NamedPolicy } from '../policies.js';
import { PrefillBar } from '../prefill-bar.js';
import { readTextFile } from '../read-text-file.js';

export interface CompareOptions extends DeviceChoice {
  readonly document: string;
  readonly question?: string;
  readonly questions?: string;
  readonly maxNewTokens: number;
}

/** A document with one question behind it. */
interface Prompt {
  readonly text: string;
  readonly tokens: number;
}

/**
 * `kv compare`: asks every question about the document under every policy and writes one row of figures for each.
 * The document is read again for each question: what a policy keeps of it may depend on the question.
 * @throws KvError of any class for a bad option, file or model; the signal's reason when interrupted
 */
export async function compare(directory: string, options: CompareOptions, context: CommandContext): Promise<void> {
  const { stdout } = context;
  const document = await readTextFile('document', options.document);
  const questions = await chooseQuestions(options);
  using model = await openModel(directory, options);
  const prompts = await makePrompts(model, document, questions, options, context.signal);

  stdout.write(`${directory} (${describeDevice(model.device)}) reads ${options.document}\n`);
  questions.forEach(({ question }, index) => {
    stdout.write(`  ${formatCount(prompts[index]?.tokens ?? 0)} tokens: ${question}\n`);
  });
  stdout.write('\n');
  const runs: PolicyRun[] = [];
  for (const policy of policies) {
    runs.push({ policy: policy.name, answers: await runPolicy(model, policy, prompts, options, context) });
  }
  stdout.write(`${renderCompareTable(questions, runs)}\n`);
}

async function chooseQuestions({ question, questions }: CompareOptions): Promise<readonly Question[]> {
  if (questions !== undefined) return readQuestions(questions);
  if (question !== undefined && question !== '') return [{ question }];
  throw new InvalidValueError('No question was given; give --question TEXT or --questions FILE.', {
    subject: 'question',
    given: question,
  });
}

/** @throws InvalidValueError when the model's context cannot hold a document with its question and answer */
async function makePrompts(
  { config, tokenizer }: Model,
  document: string,
  questions: readonly Question[],
  { maxNewTokens, document: file }: CompareOptions,
  signal: AbortSignal,
): Promise<readonly Prompt[]> {
  const prompts: Prompt[] = [];
  for (const { question } of questions) {
    const text = `${document.trimEnd()}\n${question}`;
    const tokens = (await tokenizer.encode(text, { signal })).length;
    const excess = tokens + maxNewTokens - config.maxPositions;
    if (excess > 0) {
      throw new InvalidValueError(
        `${file} with the question '${question}' has ${formatCount(tokens)} tokens; the model's context of ` +
          `${formatCount(config.maxPositions)} must hold them and an answer of ${maxNewTokens}. Shorten the document ` +
          `by ${formatCount(excess)} tokens (about ${formatCount(Math.ceil((excess * text.length) / tokens))} characters), ` +
          'or use a model with a longer context.',
        { subject: 'document', given: tokens, wanted: config.maxPositions - maxNewTokens },
      );
    }
    prompts.push({ text, tokens });
  }
  return prompts;
}

async function runPolicy(
  model: Model,
  policy: NamedPolicy,
  prompts: readonly Prompt[],
  { maxNewTokens }: CompareOptions,
  { stderr, signal }: CommandContext,
): Promise<readonly MeasuredAnswer[]> {
  const contextTokens = Math.max(...prompts.map(({ tokens }) => tokens)) + maxNewTokens;
  const total = prompts.reduce((sum, { tokens }) => sum + tokens, 0);
  using runner = model.createRunner({ policy: policy.create(), contextTokens });
  using bar = new PrefillBar(stderr, policy.name);
  const answers: MeasuredAnswer[] = [];
  let read = 0;
  for (const { text, tokens } of prompts) {
    const before = read;
    answers.push(
      await measureAnswer(runner, model.tokenizer, { text, addSpecialTokens: true }, {
        maxTokens: maxNewTokens,
        stop: ['\n'],
        signal,
        onProgress: (progress) => bar.update(before + progress.tokens, total),
      }),
    );
    read += tokens;
  }
  return answers;
}
