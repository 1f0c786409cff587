import { describe, expect, it } from 'vitest';

import type { MeasuredAnswer } from '../measure-answer.js';
import { renderCompareTable, renderUnknownAnswers } from './compare-table.js';
import { isRight } from './questions.js';

function measured(text: string, figures: Partial<MeasuredAnswer> = {}): MeasuredAnswer {
  return {
    text,
    promptTokens: 1000,
    answerTokens: 5,
    firstTokenSeconds: 1,
    prefillTokensPerSecond: 1000,
    decodeTokensPerSecond: 100,
    kvBytes: 4 << 20,
    ...figures,
  };
}

/** The cells of the rows under the head, line by line. */
function cells(table: string): string[][] {
  const lines = table.split('\n').filter((line) => line.startsWith('│'));
  return lines.slice(1).map((line) =>
    line
      .split('│')
      .slice(1, -1)
      .map((cell) => cell.trim()),
  );
}

describe('renderCompareTable', () => {
  const questions = [{ question: 'a', answer: ' 1' }, { question: 'b', answer: ' 2' }, { question: 'c' }];

  it('writes medians, the right answers and the bytes against those of the first row', () => {
    const dense = [
      measured(' 1.', { firstTokenSeconds: 3 }),
      measured(' 3', { firstTokenSeconds: 1.5, decodeTokensPerSecond: undefined }),
      measured(' 4', { firstTokenSeconds: 2, prefillTokensPerSecond: 3000 }),
    ];
    const small = dense.map((answer) => ({ ...answer, kvBytes: 1 << 20 }));
    const runs = [
      { policy: 'dense', moment: undefined, answers: dense, reservedBytes: 10 },
      { policy: 'small', moment: 'question-agnostic' as const, answers: small, reservedBytes: 6 },
    ];
    const figures = ['✓ ✗ ·', '1 of 2', '2.00 s', '1,000 tok/s', '100 tok/s'];
    expect(cells(renderCompareTable(questions, runs))).toEqual([
      ['dense', '–', ...figures, '4.0 MiB', '1.00×', '1.00×'],
      ['small', 'question-agnostic', ...figures, '1.0 MiB', '0.25×', '0.60×'],
    ]);
    expect(renderUnknownAnswers(questions, runs)).toBe(
      '\nc\n  dense                     4\n  small, question-agnostic  4\n',
    );
  });

  it('takes the mean of the two in the middle of an even number', () => {
    const answers = [1, 2, 4, 8].map((firstTokenSeconds) => measured('', { firstTokenSeconds }));
    const [row] = cells(renderCompareTable([], [{ policy: 'dense', moment: undefined, answers, reservedBytes: 1 }]));
    expect(row?.slice(3, 5)).toEqual(['–', '3.00 s']);
  });
});

describe('isRight', () => {
  it.each([
    [' 27238.', ' 27238', true],
    ['27238', ' 27238', true],
    [' 27238..', ' 27238', false],
    [' 2723', ' 27238', false],
    [' 272388', ' 27238', false],
    ['', ' 27238', false],
  ])('%j for %j: %s', (given, wanted, right) => {
    expect(isRight(given, wanted)).toBe(right);
  });
});
