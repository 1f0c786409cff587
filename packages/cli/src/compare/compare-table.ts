import Table from 'cli-table3';

import { formatBytes, formatRate, formatSeconds } from '../format.js';
import type { MeasuredAnswer } from '../measure-answer.js';
import { isRight } from './questions.js';
import type { Question } from './questions.js';

/** What one policy made of all the questions, in their order. */
export interface PolicyRun {
  readonly policy: string;
  readonly answers: readonly MeasuredAnswer[];
}

const answerWidth = 44;

/**
 * One row a policy: its answers, which of them are right, and medians over the questions.
 * @param runs the first is the reference of the last column
 */
export function renderCompareTable(questions: readonly Question[], runs: readonly PolicyRun[]): string {
  const table = new Table({
    head: [
      'policy',
      'answers',
      'right',
      'first token',
      'prefill',
      'decode',
      'KV cache',
      `of ${runs[0]?.policy ?? ''}`,
    ],
    colAligns: ['left', 'left', 'right', 'right', 'right', 'right', 'right', 'right'],
    colWidths: [null, answerWidth],
    wordWrap: true,
    style: { head: [], border: [] },
  });
  const referenceBytes = median(runs[0]?.answers.map(({ kvBytes }) => kvBytes) ?? []);
  for (const { policy, answers } of runs) {
    const kvBytes = median(answers.map((answer) => answer.kvBytes));
    const decode = answers.flatMap(({ decodeTokensPerSecond }) => decodeTokensPerSecond ?? []);
    table.push([
      policy,
      answers.map((answer, index) => describeAnswer(answer, questions[index])).join('\n'),
      countRight(questions, answers),
      formatSeconds(median(answers.map(({ firstTokenSeconds }) => firstTokenSeconds))),
      `${formatRate(median(answers.map(({ prefillTokensPerSecond }) => prefillTokensPerSecond)))} tok/s`,
      decode.length === 0 ? '–' : `${formatRate(median(decode))} tok/s`,
      formatBytes(kvBytes),
      `${(kvBytes / referenceBytes).toFixed(2)}×`,
    ]);
  }
  return table.toString();
}

function describeAnswer({ text }: MeasuredAnswer, question: Question | undefined): string {
  const wanted = question?.answer;
  const mark = wanted === undefined ? ' ' : isRight(text, wanted) ? '✓' : '✗';
  return `${mark} ${text.trim()}`;
}

function countRight(questions: readonly Question[], answers: readonly MeasuredAnswer[]): string {
  const known = questions.flatMap(({ answer }, index) => (answer === undefined ? [] : [{ answer, index }]));
  if (known.length === 0) return '–';
  const right = known.filter(({ answer, index }) => isRight(answers[index]?.text ?? '', answer)).length;
  return `${right} of ${known.length}`;
}

/** The middle value, or the mean of the two in the middle. */
function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length / 2;
  return ((sorted[Math.ceil(middle) - 1] ?? NaN) + (sorted[Math.floor(middle)] ?? NaN)) / 2;
}
