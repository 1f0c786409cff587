import { join } from 'node:path';

import { encodeExample, evaluateBudgets, readRetrievalExamples } from '@kv/eval';
import type { BudgetResult, EncodedExample, RetrievalExample } from '@kv/eval';
import type { Model } from '@kv/model';
import { openReading } from '@kv/policies';
import { InvalidValueError, kvPolicy } from '@kv/sparse-core';

/** Examples of each task, under each budget. */
export interface Quiz {
  /** Tokens of each kv head that a step of an answer reads, each number once. */
  readonly budgets: readonly number[];
  readonly promptTokens: number;
  /** Of each task. */
  readonly examples: number;
}

/** Right answers of one task. */
export interface TaskScore {
  readonly task: string;
  readonly examples: number;
  /** Right answers under each budget. */
  readonly right: readonly number[];
  /** The same where a step reads all tokens. */
  readonly rightOfAll: number;
}

/** Beside the weights. */
const fileName = join('eval', 'eval.jsonl.gz');

/**
 * Asks a model's held-out examples by answers that read some blocks of a text.
 * @param onExample called when an example is done
 * @throws InvalidValueError when the model has no such examples, or a budget is none; the signal's reason
 */
export async function askByBudget(model: Model, quiz: Quiz, signal: AbortSignal, onExample: (done: number, total: number) => void): Promise<TaskScore[]> {
  const chosen = choose(await readRetrievalExamples(join(model.directory, fileName)), quiz);
  const encoded: EncodedExample[] = [];
  for (const example of chosen) encoded.push(await encodeExample(model.tokenizer, example));
  const contextTokens = Math.max(...encoded.map(({ prompt, answer }) => prompt.length + answer.length));
  const tooMany = quiz.budgets.find((budget) => budget >= contextTokens);
  if (tooMany !== undefined) {
    const wanted = `fewer than the ${contextTokens} of prompt and answer`;
    throw new InvalidValueError(`--budgets: given ${tooMany}; wanted tokens that are ${wanted}.`, { subject: 'budgets', given: tooMany, wanted });
  }
  const budgets = [...quiz.budgets, contextTokens];
  const cache = { contextTokens, sequences: budgets.length + 1 };
  using opened = await openReading({ name: 'blocks', budgetTokens: contextTokens }, model, cache);
  using runner = model.createRunner({ policy: kvPolicy(opened.parts), ...cache });
  // A budget that the store cannot keep is found before anything is read.
  for (const budgetTokens of quiz.budgets) runner.openSequence({ budgetTokens }).dispose();
  const results: BudgetResult[] = [];
  for (const [index, example] of encoded.entries()) {
    results.push(...(await evaluateBudgets(runner, example, budgets, { signal })));
    onExample(index + 1, encoded.length);
  }
  return [...new Set(results.map(({ task }) => task))].map((task) => {
    const own = results.filter((result) => result.task === task);
    const right = budgets.map((budget) => own.filter((result) => result.budgetTokens === budget && result.right).length);
    return { task, examples: own.length / budgets.length, right: right.slice(0, -1), rightOfAll: right.at(-1) ?? 0 };
  });
}

/** @throws InvalidValueError when there is none of that length */
function choose(all: readonly RetrievalExample[], { promptTokens, examples }: Quiz): RetrievalExample[] {
  const fitting = all.filter(({ length }) => length === promptTokens);
  if (fitting.length > 0) return fitting.filter(({ task }, index) => fitting.slice(0, index).filter((other) => other.task === task).length < examples);
  const lengths = [...new Set(all.map(({ length }) => length))].join(', ');
  throw new InvalidValueError(`--prompt-tokens: given ${promptTokens}; the model's examples have ${lengths} tokens. Give one of these.`, {
    subject: 'prompt-tokens',
    given: promptTokens,
    wanted: lengths,
  });
}
