import { expectObject, expectThat, reading } from '@kv/sparse-core/native';

import type { RetrievalResult } from './evaluate-retrieval.js';

/** Right answers among the results that share a key. */
export interface RetrievalScore {
  readonly examples: number;
  /** How many of them were answered right. */
  readonly right: number;
  /** `right / examples` */
  readonly share: number;
  /** Mean over the examples. */
  readonly kvBytes: number;
}

/**
 * Counts right answers by key, such as `({ policy, length }) => `${policy} ${length}``. Keys stand in the order in
 * which they first appear.
 */
export function summariseRetrieval(
  results: Iterable<RetrievalResult>,
  keyOf: (result: RetrievalResult) => string,
): Map<string, RetrievalScore> {
  expectThat('summariseRetrieval', 'keyOf', keyOf, typeof keyOf === 'function', 'a function');
  const scores = new Map<string, RetrievalScore>();
  for (const result of checkedResults(results)) {
    const key = keyOf(result);
    const { examples, right, kvBytes } = scores.get(key) ?? { examples: 0, right: 0, kvBytes: 0 };
    const count = examples + 1;
    const rightNow = right + (result.right ? 1 : 0);
    const mean = kvBytes + (result.kvBytes - kvBytes) / count;
    scores.set(key, { examples: count, right: rightNow, share: rightNow / count, kvBytes: mean });
  }
  return scores;
}

/** @throws InvalidValueError unless all are results */
function checkedResults(results: Iterable<RetrievalResult>): RetrievalResult[] {
  return reading('summariseRetrieval: results', () => {
    const all: RetrievalResult[] = [];
    for (const result of results) {
      expectObject('summariseRetrieval', 'results', result);
      const isCounted = Number.isFinite(result.kvBytes) && typeof result.right === 'boolean';
      expectThat('summariseRetrieval', 'results', result, isCounted, 'results of evaluateRetrieval()');
      all.push(result);
    }
    return all;
  });
}
