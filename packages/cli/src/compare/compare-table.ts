import Table from 'cli-table3';

import { formatBytes, formatRate, formatSeconds } from '../format.js';
import type { MeasuredAnswer } from '../measure-answer.js';
import { isRight } from './questions.js';
import type { Question } from './questions.js';
import type { PolicyRun } from './run-reading.js';

/**
 * One row a policy and moment of selection: which answers are right, and medians over the questions.
 * @param runs the first is the reference of the last two columns
 */
export function renderCompareTable(questions: readonly Question[], runs: readonly PolicyRun[]): string {
  const [reference] = runs;
  const table = new Table({
    head: [
      'policy',
      'selection',
      'answers',
      'right',
      'first token',
      'prefill',
      'decode',
      'KV cache',
      `of ${reference?.policy ?? ''}`,
      'reserved',
    ],
    colAligns: ['left', 'left', 'left', 'right', 'right', 'right', 'right', 'right', 'right', 'right'],
    style: { head: [], border: [], compact: true },
  });
  const referenceBytes = median(reference?.answers.map(({ kvBytes }) => kvBytes) ?? []);
  for (const { policy, moment, answers, reservedBytes } of runs) {
    const kvBytes = median(answers.map((answer) => answer.kvBytes));
    const decode = answers.flatMap(({ decodeTokensPerSecond }) => decodeTokensPerSecond ?? []);
    table.push([
      policy,
      moment ?? '–',
      answers.map((answer, index) => mark(answer, questions[index])).join(' '),
      countRight(questions, answers),
      formatSeconds(median(answers.map(({ firstTokenSeconds }) => firstTokenSeconds))),
      `${formatRate(median(answers.map(({ prefillTokensPerSecond }) => prefillTokensPerSecond)))} tok/s`,
      decode.length === 0 ? '–' : `${formatRate(median(decode))} tok/s`,
      formatBytes(kvBytes),
      `${(kvBytes / referenceBytes).toFixed(2)}×`,
      `${(reservedBytes / (reference?.reservedBytes ?? NaN)).toFixed(2)}×`,
    ]);
  }
  return table.toString();
}

/** For each question whose answer nobody knows, what was answered, by whom. */
export function renderUnknownAnswers(questions: readonly Question[], runs: readonly PolicyRun[]): string {
  const unknown = [...questions.entries()].filter(([, { answer }]) => answer === undefined);
  return unknown
    .map(([index, { question }]) => {
      const answered = runs.map(({ policy, moment, answers }) => {
        const name = moment === undefined ? policy : `${policy}, ${moment}`;
        return [name, (answers[index]?.text ?? '').trim()] as const;
      });
      const width = Math.max(...answered.map(([name]) => name.length));
      const lines = answered.map(([name, text]) => `  ${name.padEnd(width)}  ${text}\n`);
      return `\n${question}\n${lines.join('')}`;
    })
    .join('');
}

function mark({ text }: MeasuredAnswer, question: Question | undefined): string {
  const wanted = question?.answer;
  if (wanted === undefined) return '·';
  return isRight(text, wanted) ? '✓' : '✗';
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
