import { prefill } from '@kv/model';
import type { Runner, Sequence } from '@kv/model';
import { expectOptions, expectSignal, expectThat, listOf } from '@kv/sparse-core/native';

import { expectRunner } from '../expect-given.js';
import { likeliestTokens } from '../likeliest-tokens.js';
import { expectExample } from './examples.js';
import type { EncodedExample } from './examples.js';

/** One example under one budget. */
export interface BudgetResult extends Pick<EncodedExample, 'id' | 'task' | 'length'> {
  /** Tokens of each kv head that each step of the answer read. */
  readonly budgetTokens: number;
  /** Whether greedy decoding answers as it should, in every token. */
  readonly right: boolean;
}

export interface BudgetOptions {
  readonly signal?: AbortSignal | undefined;
}

const operation = 'evaluateBudgets';
const mostBudgets = 4096;

/**
 * Asks an example's question under budgets of tokens that a step of the answer reads. The prompt is read once, with the attention
 * of the runner's policy; each budget then answers in a fork, step by step: greedy decoding gives the answer if and only if every
 * token of it is the likeliest one behind those before.
 * @param runner for one sequence more than there are budgets, over a store that has such budgets: `hierarchicalStore`
 * @throws CapabilityError for another store, InvalidValueError for a budget that the store does not allow; QueueFullError,
 *   OutOfMemoryError when the runner is too small; the signal's reason when it is aborted
 */
export async function evaluateBudgets(runner: Runner, example: EncodedExample, budgets: readonly number[], options: BudgetOptions = {}): Promise<BudgetResult[]> {
  expectRunner(operation, runner);
  expectExample(operation, example);
  expectOptions(operation, options, { signal: true });
  const { signal } = options;
  expectSignal(operation, signal);
  const given = listOf(operation, 'budgets', budgets, mostBudgets);
  for (const tokens of given) expectThat(operation, 'budgets', tokens, Number.isSafeInteger(tokens) && tokens > 0, 'numbers of tokens');
  const { id, task, length, prompt, answer } = example;
  using sequence = runner.openSequence();
  using first = await prefill(runner, sequence, prompt, { signal });
  const [beginning] = await likeliestTokens(runner, first);
  const right = given.map(() => beginning === answer[0]);
  const forks: Sequence[] = [];
  try {
    for (const budgetTokens of given) forks.push(runner.fork(sequence, { budgetTokens }));
    for (let token = 1; token < answer.length && forks.length > 0; token++) {
      signal?.throwIfAborted();
      const ids = answer.slice(token - 1, token);
      using logits = await runner.step(forks.map((fork) => ({ sequence: fork, ids, phase: 'decode' })));
      const chosen = await likeliestTokens(runner, logits);
      chosen.forEach((likeliest, index) => (right[index] = right[index] === true && likeliest === answer[token]));
    }
  } finally {
    for (const fork of forks) fork.dispose();
  }
  return given.map((budgetTokens, index) => ({ id, task, length, budgetTokens, right: right[index] === true }));
}
