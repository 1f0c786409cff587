import { InvalidValueError } from '@kv/sparse-core';
import { expectObject, listOf } from '@kv/sparse-core/native';

import { expectCount, positionsOf } from '../expect-given.js';
import { attentionOutput, attentionWeights, countTokens } from './attention.js';
import type { HeadCache } from './attention.js';
import { largestGap } from './index-spread.js';
import { capturedMass, massEfficiency, topRecall } from './mass.js';
import { mean, percentile } from './numbers.js';
import { relativeError } from './output-error.js';

export interface SelectionTrial {
  readonly cache: HeadCache;
  /** Queries that the selection has not seen, each `[dim]`: the observation window's own always look good. */
  readonly heldOutQueries: readonly Float32Array[];
  /** What was kept, ascending. */
  readonly kept: readonly number[];
  /** Scores are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /** The tokens of greatest weight that `topRecall` asks for. Default 32, at most all. */
  readonly topTokens?: number | undefined;
}

const mostQueries = 2 ** 20;

/** What a selection does to queries that it did not see; see `docs/eval.md`. */
export interface SelectionFidelity {
  /** The share of the attention that falls on what was kept, the mean over the queries. */
  readonly capturedMass: number;
  /** The same, as a share of what the best as many tokens would have, the mean. */
  readonly massEfficiency: number;
  /** The share of the `topTokens` of greatest weight that were kept, the mean. */
  readonly topRecall: number;
  /** Of the attention's output, over the queries. */
  readonly outputError: { readonly mean: number; readonly percentile95: number; readonly greatest: number };
  /** The longest run of dropped tokens, as a share of the text. */
  readonly largestGap: number;
}

/**
 * Measures a selection of one kv head on held-out queries: means over them, and the spread of the output's error.
 * @throws ShapeError for ragged arrays; InvalidValueError without queries, or for positions that do not ascend
 *   within the cache
 */
export function selectionFidelity(trial: SelectionTrial): SelectionFidelity {
  expectObject('selectionFidelity', 'trial', trial);
  const { cache, scale, topTokens = 32 } = trial;
  const tokens = countTokens(cache);
  const kept = positionsOf('selectionFidelity', trial.kept, tokens);
  const heldOutQueries = listOf('selectionFidelity', 'heldOutQueries', trial.heldOutQueries, mostQueries);
  expectCount('selectionFidelity', 'topTokens', topTokens);
  const ascends = kept.every((token, index) => token > (kept[index - 1] ?? -1));
  if (kept.length === 0 || !ascends) {
    throw new InvalidValueError(`kept must hold ascending positions below ${tokens}, at least one.`, {
      subject: 'kept',
      given: kept,
      wanted: tokens,
    });
  }
  if (heldOutQueries.length === 0) {
    throw new InvalidValueError('There is no held-out query to measure with.', { subject: 'heldOutQueries' });
  }
  const k = Math.min(tokens, topTokens);
  const each = heldOutQueries.map((query) => {
    const weights = attentionWeights(query, cache, scale);
    return {
      mass: capturedMass(weights, kept),
      efficiency: massEfficiency(weights, kept),
      recall: topRecall(weights, kept, k),
      error: relativeError(attentionOutput(weights, cache, kept), attentionOutput(weights, cache)),
    };
  });
  const errors = each.map(({ error }) => error);
  return {
    capturedMass: mean(each.map(({ mass }) => mass)),
    massEfficiency: mean(each.map(({ efficiency }) => efficiency)),
    topRecall: mean(each.map(({ recall }) => recall)),
    outputError: { mean: mean(errors), percentile95: percentile(errors, 0.95), greatest: Math.max(...errors) },
    largestGap: largestGap(kept, tokens),
  };
}
