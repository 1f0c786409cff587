import type { RetrievalResult } from './evaluate-retrieval.js';

/** Right answers among the results that share a key. */
export interface RetrievalScore {
  readonly examples: number;
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
  const scores = new Map<string, RetrievalScore>();
  for (const result of results) {
    const key = keyOf(result);
    const { examples, right, kvBytes } = scores.get(key) ?? { examples: 0, right: 0, kvBytes: 0 };
    const count = examples + 1;
    const rightNow = right + (result.right ? 1 : 0);
    const mean = kvBytes + (result.kvBytes - kvBytes) / count;
    scores.set(key, { examples: count, right: rightNow, share: rightNow / count, kvBytes: mean });
  }
  return scores;
}
