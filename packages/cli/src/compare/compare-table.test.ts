import { stripVTControlCharacters } from 'node:util';

import { describe, expect, it } from 'vitest';

import { advise } from './advice.js';
import { denseReasons, renderCompareTable, renderUnknownAnswers } from './compare-table.js';
import { isRight } from './questions.js';
import type { PolicyRun } from './run-reading.js';

const mebibyte = 2 ** 20;

function run(policy: string, texts: readonly string[], mebibytes: number, reserved = 1, density = 1, onHost = 0): PolicyRun {
  const answers = texts.map((text) => ({ text, kvBytes: { device: mebibytes * mebibyte, host: onHost * mebibyte } }));
  return { policy, moment: undefined, answers, reservedBytes: { device: reserved, host: onHost }, density, fallback: undefined };
}

/** The lines of a table without its styles, cell by cell; the first is its head. */
function cells(table: string): string[][] {
  return stripVTControlCharacters(table)
    .split('\n')
    .map((line) => line.trim().split(/ {2,}/));
}

describe('renderCompareTable', () => {
  const questions = [{ question: 'a', answer: ' 1' }, { question: 'b', answer: ' 2' }, { question: 'c' }];
  const texts = [' 1.', ' 3', ' 4'];
  const dense = run('dense', texts, 4, 10);
  const small = { ...run('small', texts, 1, 6), moment: 'question-agnostic' as const };

  it('writes marks, medians, and the bytes against those of the first row', () => {
    expect(cells(renderCompareTable(questions, [dense, small], undefined, small))).toEqual([
      ['policy', 'question', 'answers', 'KV cache', 'of dense', 'room'],
      ['dense', '–', '✓✗·', '4.0 MiB', '1.00×', '1.00×'],
      ['→', 'small', 'unseen', '✓✗·', '1.0 MiB', '0.25×', '0.60×'],
    ]);
    expect(renderUnknownAnswers(questions, [dense, small])).toBe(
      '\nc\n  dense                   4\n  small, question unseen  4\n',
    );
  });

  it('leaves out when the question was seen where it always was', () => {
    const aware = { ...small, moment: 'question-aware' as const };
    const [head] = cells(renderCompareTable(questions, [dense, aware], undefined, undefined));
    expect(head).not.toContain('question');
  });

  it('shows a share of right answers for the policy and the moment that were measured', () => {
    const shares = [
      { policy: 'dense', right: 99.7, examples: 362 },
      { policy: 'small', moment: 'question-aware' as const, right: 50, examples: 160 },
    ];
    const aware = { ...small, moment: 'question-aware' as const };
    const table = renderCompareTable(questions, [dense, aware, small], { tokens: [4096], shares }, undefined);
    expect(cells(table).map((row) => row[3])).toEqual(['held-out', '99.7 %', '50.0 %', '–']);
  });

  it('takes the mean of the two in the middle of an even number', () => {
    const answers = [1, 2, 4, 8].map((size) => ({ text: '', kvBytes: { device: size * mebibyte, host: 0 } }));
    const table = renderCompareTable([], [{ ...dense, answers }], undefined, undefined);
    expect(cells(table)[1]).toEqual(['dense', '3.0 MiB', '1.00×', '1.00×']);
  });

  it('shows what is on the host apart, where something is', () => {
    const split = run('split', texts, 1, 5, 1, 3);
    expect(cells(renderCompareTable(questions, [dense, split], undefined, undefined))).toEqual([
      ['policy', 'answers', 'KV cache', 'of dense', 'room'],
      ['dense', '✓✗·', '4.0 MiB', '1.00×', '1.00×'],
      ['split', '✓✗·', '1.0 MiB', '0.25×', '0.50×'],
      ['and on the host', '3.0 MiB'],
    ]);
  });

  it('counts the right answers of more questions than have room', () => {
    const many = Array.from({ length: 30 }, (_, index) => ({ question: 'a', ...(index > 0 && { answer: String(index % 2) }) }));
    const [, row] = cells(renderCompareTable(many, [run('dense', many.map(() => '1'), 1)], undefined, undefined));
    expect(row?.[1]).toBe('15 of 29');
  });

  it('says how much of the attention was computed where it was not all', () => {
    const sparse = { ...dense, policy: 'sparse', density: 0.2579 };
    const unknown = { ...dense, policy: 'unknown', density: undefined };
    const table = cells(renderCompareTable(questions, [dense, sparse, unknown], undefined, undefined));
    expect(table.map((row) => row[2])).toEqual(['density', '100 %', '25.8 %', '–']);
  });

  it('says why a policy that could have skipped computed all', () => {
    const short = { ...dense, policy: 'sparse', fallback: 'it is short' };
    const again = { ...short, moment: 'question-aware' as const };
    const other = { ...short, policy: 'other' };
    const partly = { ...short, policy: 'partly', density: 0.5 };
    const flat = { ...dense, policy: 'flat', fallback: 'it is flat' };
    expect(denseReasons([dense, short, again, other, partly, flat])).toEqual([
      'sparse, other: read densely, because it is short',
      'flat: read densely, because it is flat',
    ]);
  });

  it('is narrower than 80 columns with a density', () => {
    const policies = ['dense', 'skeleton-1/8+hbw-1/4'].map((name) => run(name, Array<string>(8).fill('1'), 45, 1, 0.258));
    const eight = policies[0]?.answers.map(() => ({ question: 'a', answer: '1' })) ?? [];
    const table = renderCompareTable(eight, policies, { tokens: [1], shares: [] }, policies[0]);
    for (const line of stripVTControlCharacters(table).split('\n')) expect(line.length).toBeLessThan(80);
  });

  it('is narrower than 76 columns, with colours for marks', () => {
    const policies = ['dense', 'hbw-1/4+hierasparse'].map((name) => run(name, Array<string>(8).fill('1'), 1000));
    const eight = policies[0]?.answers.map(() => ({ question: 'a', answer: '1' })) ?? [];
    const table = renderCompareTable(eight, policies, { tokens: [1], shares: [] }, policies[0]);
    for (const line of stripVTControlCharacters(table).split('\n')) expect(line.length).toBeLessThan(76);
    expect(table).toContain('\x1b[32m✓');
  });
});

describe('advise', () => {
  const known = [{ question: 'a', answer: '1' }, { question: 'b', answer: '2' }];
  const dense = run('dense', ['1', '2'], 40);
  it.each([
    ['the smallest that loses no answer', [run('a', ['1.', ' 2'], 30), run('b', ['1', '2'], 10), run('c', ['1', '3'], 5)], /^Take b: no answer lost, 10\.0 MiB instead of 40\.0 MiB \(−75 %\)\.$/],
    ['the first where all others lose some', [run('a', ['1', ''], 30)], /^Take dense: every smaller cache loses answers/],
    ['the first where no cache is smaller', [run('a', ['1', '2'], 40)], /^Take dense: no other cache is smaller on this text\.$/],
  ])('takes %s', (_name, others, text) => {
    const runs = [dense, ...others];
    const advice = advise(known, runs);
    expect(advice.text).toMatch(text);
    expect(advice.text).toContain(`Take ${advice.run?.policy ?? ''}:`);
  });

  it('counts what is on the host too', () => {
    expect(advise(known, [dense, run('split', ['1', '2'], 10, 1, 1, 31)]).run?.policy).toBe('dense');
    expect(advise(known, [dense, run('split', ['1', '2'], 10, 1, 1, 29)]).run?.policy).toBe('split');
  });

  it('asks nothing of others that the first does not answer right', () => {
    expect(advise(known, [run('dense', ['1', '0'], 40), run('a', ['1', '5'], 30)]).run?.policy).toBe('a');
    expect(advise(known, [run('dense', ['0', '0'], 40), run('a', ['1', '2'], 30)])).toEqual({
      run: undefined,
      text: 'Not even dense answers right: this text and model tell nothing.',
    });
  });

  it('takes the answers of the first where nobody knows the right ones', () => {
    const unknown = [{ question: 'a' }];
    const runs = [run('dense', ['yes.'], 40), run('a', ['yes'], 30), run('b', ['no'], 10)];
    expect(advise(unknown, runs).run?.policy).toBe('a');
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
