import type { Model } from '@kv/model';
import { InvalidValueError } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { renderCompareTable } from '../compare/compare-table.js';
import type { PolicyRun } from '../compare/compare-table.js';
import { readQuestions } from '../compare/questions.js';
import type { Question } from '../compare/questions.js';
import { describeDevice } from '../describe-device.js';
import { encodePrompt } from '../encode-prompt.js';
import type { EncodedPrompt } from '../encode-prompt.js';
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

/**
 * `kv compare`: asks every question about the document under every policy, and writes a row for each policy.
 * The document is read again for each question: what a policy keeps of it may depend on the question.
 * @throws KvError of any class for a bad option, file or model; the signal's reason when interrupted
 */
export async function compare(
  directory: string,
  options: CompareOptions,
  context: CommandContext,
): Promise<void> {
  const { stdout } = context;
  const document = await readTextFile('document', options.document);
  const questions = await chooseQuestions(options);
  using model = await openModel(directory, options);
  const prompts: EncodedPrompt[] = [];
  for (const { question } of questions) {
    const name = `${options.document} with the question '${question}'`;
    const prompt = { name, text: `${document.trimEnd()}\n${question}` };
    prompts.push(await encodePrompt(model, prompt, options.maxNewTokens, context.signal));
  }

  stdout.write(`${directory} (${describeDevice(model.device)}) reads ${options.document}\n`);
  questions.forEach(({ question }, index) => {
    stdout.write(`  ${formatCount(prompts[index]?.ids.length ?? 0)} tokens: ${question}\n`);
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

async function runPolicy(
  model: Model,
  policy: NamedPolicy,
  prompts: readonly EncodedPrompt[],
  { maxNewTokens }: CompareOptions,
  { stderr, signal }: CommandContext,
): Promise<readonly MeasuredAnswer[]> {
  const lengths = prompts.map(({ ids }) => ids.length);
  const total = lengths.reduce((sum, length) => sum + length, 0);
  using runner = model.createRunner({
    policy: policy.create(),
    contextTokens: Math.max(...lengths) + maxNewTokens,
  });
  using bar = new PrefillBar(stderr, policy.name);
  const answers: MeasuredAnswer[] = [];
  let read = 0;
  for (const prompt of prompts) {
    const before = read;
    const answer = await measureAnswer(runner, model.tokenizer, prompt, {
      maxTokens: maxNewTokens,
      stop: ['\n'],
      signal,
      onProgress: ({ tokens }) => bar.update(before + tokens, total),
    });
    answers.push(answer);
    read += prompt.ids.length;
  }
  return answers;
}
