import type { Moment } from '@kv/eval';
import type { Model } from '@kv/model';
import { policies } from '@kv/policies';
import type { NamedPolicy } from '@kv/policies';
import { CapabilityError, InvalidValueError } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { advise } from '../compare/advice.js';
import { denseReasons, renderCompareTable, renderUnknownAnswers } from '../compare/compare-table.js';
import { expectReading } from '../compare/expected-duration.js';
import { readHeldOut } from '../compare/held-out.js';
import type { HeldOut } from '../compare/held-out.js';
import { readQuestions } from '../compare/questions.js';
import type { Question } from '../compare/questions.js';
import { runReading } from '../compare/run-reading.js';
import type { EncodedQuestions, PolicyRun } from '../compare/run-reading.js';
import { describeDevice } from '../describe-device.js';
import { encodePrompt } from '../encode-prompt.js';
import { formatCount, formatRoughly, styled } from '../format.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { readTextFile } from '../read-text-file.js';

export interface CompareOptions extends DeviceChoice {
  readonly document: string;
  readonly question?: string | undefined;
  readonly questions?: string | undefined;
  readonly maxNewTokens: number;
  readonly all: boolean;
}

/** A line of the screen. */
const mostColumns = 75;

/**
 * `kv compare`: asks every question about the document under the best setting of each method, or under every one and,
 * if it selects, at each moment of selection; writes a row for each, and which to take. The document is read once for
 * each way of reading it. A way that cannot take this model is left out, and stderr says why.
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
  const heldOut = await readHeldOut(directory, signal);
  using model = await openModel(directory, options);
  const text = await encodeQuestions(model, document.trimEnd(), questions, options, context);

  stdout.write(`${directory} on ${describeDevice(model.device)}\n`);
  stdout.write(`reads ${options.document}, ${formatCount(text.document.length)} tokens\n`);
  const chosen = options.all ? policies : bestOfEachMethod();
  const readings = new Set(chosen.map((policy) => policy.reading)).size;
  const seconds = readings * (await expectReading(model, text.document, signal));
  stderr.write(`To read it ${readings} times takes about ${formatRoughly(seconds)} here.\n`);
  for (const { question, answer = '' } of questions) {
    const isLong = question.length + answer.length + 2 > mostColumns;
    stdout.write(isLong ? `  ${question}\n   ${answer}\n` : `  ${question}${answer}\n`);
  }
  stdout.write('\n');
  const runs = await runPolicies(model, chosen, text, options, context);
  const { run: advised, text: advice } = advise(questions, runs);
  stdout.writeStyled(`${renderCompareTable(questions, runs, heldOut, advised)}\n`);
  stdout.write(renderUnknownAnswers(questions, runs));
  const lines = [...[...denseReasons(runs), ...notes(heldOut, options)].map((note) => styled('dim', note)), styled('bold', advice)];
  stdout.writeStyled(`\n${lines.join('\n')}\n`);
}

async function runPolicies(
  model: Model,
  chosen: readonly NamedPolicy[],
  text: EncodedQuestions,
  { all, maxNewTokens }: CompareOptions,
  context: CommandContext,
): Promise<PolicyRun[]> {
  const moments: readonly Moment[] = all ? ['question-aware', 'question-agnostic'] : ['question-aware'];
  const runs: PolicyRun[] = [];
  for (const reading of new Set(chosen.map((policy) => policy.reading))) {
    const ofReading = chosen.filter((policy) => policy.reading === reading);
    try {
      runs.push(...(await runReading(model, reading, ofReading, moments, text, maxNewTokens, context)));
    } catch (error) {
      // What a method cannot do with this model leaves the rows of the others.
      if (!(error instanceof CapabilityError) || runs.length === 0) throw error;
      context.stderr.write(`${ofReading.map(({ name }) => name).join(', ')}: left out. ${error.message}\n`);
    }
  }
  return runs;
}

/** The first setting of each method stands for it. */
function bestOfEachMethod(): readonly NamedPolicy[] {
  return policies.filter(({ method }, index) => policies.findIndex((each) => each.method === method) === index);
}

/** What the table's reader must know, line by line. */
function notes(heldOut: HeldOut | undefined, { all }: CompareOptions): string[] {
  const lines: string[] = [];
  if (heldOut !== undefined) {
    const counts = heldOut.shares.map(({ examples }) => examples);
    const lengths = heldOut.tokens.map(formatCount).join(' and ');
    const examples = `${Math.min(...counts)} to ${Math.max(...counts)} examples of ${lengths} tokens`;
    lines.push(`held-out: right among ${examples}`);
  }
  if (!all) lines.push('What is kept was chosen with the question in sight. --all: every setting.');
  return lines;
}

async function chooseQuestions(
  { question, questions }: CompareOptions,
  signal: AbortSignal,
): Promise<readonly Question[]> {
  if (questions !== undefined) return readQuestions(questions, signal);
  if (question !== undefined) return [{ question }];
  throw new InvalidValueError('No question was given; give --question TEXT or --questions FILE.', { subject: 'question' });
}

/** The document's tokens are those that all prompts begin with. */
async function encodeQuestions(
  model: Model,
  document: string,
  questions: readonly Question[],
  { document: file, maxNewTokens }: CompareOptions,
  { signal }: CommandContext,
): Promise<EncodedQuestions> {
  const alone = await model.tokenizer.encode(`${document}\n`, { signal });
  const prompts: Int32Array[] = [];
  for (const { question } of questions) {
    const prompt = { name: `${file} with the question '${question}'`, text: `${document}\n${question}` };
    prompts.push((await encodePrompt(model, prompt, maxNewTokens, signal)).ids);
  }
  const shared = Math.min(...prompts.map((ids) => commonPrefix(alone, ids)));
  return {
    document: alone.subarray(0, shared),
    questions: prompts.map((ids) => ids.subarray(shared)),
  };
}

function commonPrefix(one: Int32Array, other: Int32Array): number {
  const end = one.findIndex((id, index) => id !== other[index]);
  return end === -1 ? one.length : end;
}
