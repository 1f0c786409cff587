import { expectThat } from '@kv/sparse-core/native';

/** What bounds the keys of a row that are never estimated. */
export interface ExactTokens {
  /** S: the sequence's first keys. From 0 to 1024; default: 1. */
  readonly sinkTokens?: number | undefined;
  /** T: each row's nearest keys, its own the first. From 1 on, up to 4096 beside an estimate; default: 100. */
  readonly diagonalTokens?: number | undefined;
}

/** @throws InvalidValueError when one is out of range */
export function exactTokens(subject: string, { sinkTokens = 1, diagonalTokens = 100 }: ExactTokens, mostDiagonal = 4096) {
  expectThat(subject, 'sinkTokens', sinkTokens, isWhole(sinkTokens, 0, 1024), 'a whole number from 0 to 1024');
  expectThat(subject, 'diagonalTokens', diagonalTokens, isWhole(diagonalTokens, 1, mostDiagonal), `a whole number from 1 to ${mostDiagonal}`);
  return { sinkTokens, diagonalTokens } as const;
}

/** Whether it is a whole number in a range, both ends included. */
export function isWhole(given: number, lowest: number, highest: number): boolean {
  return Number.isInteger(given) && given >= lowest && given <= highest;
}
