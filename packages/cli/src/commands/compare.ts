import type { Model } from '@kv/model';
import { CapabilityError, InvalidValueError } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { renderCompareTable, renderUnknownAnswers } from '../compare/compare-table.js';
import { readQuestions } from '../compare/questions.js';
import type { Question } from '../compare/questions.js';
import { runReading } from '../compare/run-reading.js';
import type { EncodedQuestions, PolicyRun } from '../compare/run-reading.js';
import { describeDevice } from '../describe-device.js';
import { encodePrompt } from '../encode-prompt.js';
import { formatCount } from '../format.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { policies } from '@kv/policies';
import { readTextFile } from '../read-text-file.js';

export interface CompareOptions extends DeviceChoice {
  readonly document: string;
  readonly question?: string | undefined;
  readonly questions?: string | undefined;
  readonly maxNewTokens: number;
}

/**
 * `kv compare`: asks every question about the document under every policy, and writes a row for each policy and, if
 * it selects, for each moment of selection. The document is read once for each way of reading it. A way that cannot
 * take this model is left out, and stderr says why.
 * @throws KvError of any class for a bad option, file or model; the signal's reason when interrupted
 */
export async function compare(
  directory: string,
  options: CompareOptions,
  context: CommandContext,
): Promise<void> {
  const { stdout, stderr, signal } = context;
  const document = await readTextFile('document', options.document, signal);
  const questions = await chooseQuestions(options, signal);
  using model = await openModel(directory, options);
  const text = await encodeQuestions(model, document.trimEnd(), questions, options, context);

  stdout.write(`${directory} (${describeDevice(model.device)}) reads ${options.document}, `);
  stdout.write(`${formatCount(text.document.length)} tokens\n`);
  for (const { question, answer } of questions) stdout.write(`  ${question}${answer ?? ''}\n`);
  stdout.write('\n');
  const runs: PolicyRun[] = [];
  for (const reading of new Set(policies.map((policy) => policy.reading))) {
    const ofReading = policies.filter((policy) => policy.reading === reading);
    try {
      runs.push(...(await runReading(model, reading, ofReading, text, options.maxNewTokens, context)));
    } catch (error) {
      // What a method cannot do with this model leaves the rows of the others.
      if (!(error instanceof CapabilityError) || runs.length === 0) throw error;
      stderr.write(`${ofReading.map(({ name }) => name).join(', ')}: left out. ${error.message}\n`);
    }
  }
  stdout.write(`${renderCompareTable(questions, runs)}\n`);
  stdout.write(renderUnknownAnswers(questions, runs));
}

async function chooseQuestions(
  { question, questions }: CompareOptions,
  signal: AbortSignal,
): Promise<readonly Question[]> {
  if (questions !== undefined) return readQuestions(questions, signal);
  if (question !== undefined && question !== '') return [{ question }];
  throw new InvalidValueError('No question was given; give --question TEXT or --questions FILE.', {
    subject: 'question',
    given: question,
  });
}

/** The document's tokens are those that all prompts begin with. */
async function encodeQuestions(
  model: Model,
  document: string,
  questions: readonly Question[],
  { document: file, maxNewTokens }: CompareOptions,
  { signal }: CommandContext,
): Promise<EncodedQuestions> {
  const started = performance.now();
  const alone = await model.tokenizer.encode(`${document}\n`, { signal });
  const seconds = (performance.now() - started) / 1000;
  const prompts: Int32Array[] = [];
  for (const { question } of questions) {
    const prompt = { name: `${file} with the question '${question}'`, text: `${document}\n${question}` };
    prompts.push((await encodePrompt(model, prompt, maxNewTokens, signal)).ids);
  }
  const shared = Math.min(...prompts.map((ids) => commonPrefix(alone, ids)));
  return {
    document: alone.subarray(0, shared),
    questions: prompts.map((ids) => ids.subarray(shared)),
    seconds,
  };
}

function commonPrefix(one: Int32Array, other: Int32Array): number {
  const end = one.findIndex((id, index) => id !== other[index]);
  return end === -1 ? one.length : end;
}
