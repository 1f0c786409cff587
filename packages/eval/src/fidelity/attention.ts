import { ShapeError } from '@kv/sparse-core';
import { expectObject, expectThat } from '@kv/sparse-core/native';

import { expectCount, expectFloats, numbersOf, positionsOf } from '../expect-given.js';

/** Keys and values of one kv head, `[token, dim]`, row by row. */
export interface HeadCache {
  readonly keys: Float32Array;
  readonly values: Float32Array;
  readonly headDim: number;
}

/**
 * The tokens of a head's cache.
 * @throws ShapeError when keys and values are not whole rows, as many of each
 */
export function countTokens(cache: HeadCache): number {
  expectObject('a head', 'cache', cache);
  const { keys, values, headDim } = cache;
  expectFloats('a head', 'keys', keys);
  expectFloats('a head', 'values', values);
  expectCount('a head', 'headDim', headDim);
  const tokens = keys.length / headDim;
  if (Number.isInteger(tokens) && tokens > 0 && values.length === keys.length) return tokens;
  throw new ShapeError(
    `The cache has ${keys.length} numbers of keys and ${values.length} of values; wanted the same number of rows of ` +
      `${headDim} in both, at least one.`,
    { subject: 'cache', given: [keys.length, values.length], wanted: headDim },
  );
}

/**
 * What one query gives each token: `a_i = exp(s q·k_i) / Σ_j exp(s q·k_j)`, in f64.
 * @param query `[dim]`
 * @throws ShapeError
 */
export function attentionWeights(query: Float32Array, cache: HeadCache, scale: number): Float64Array {
  const tokens = countTokens(cache);
  const { keys, headDim } = cache;
  expectFloats('attentionWeights', 'query', query);
  expectThat('attentionWeights', 'scale', scale, Number.isFinite(scale), 'a finite number');
  if (query.length !== headDim) {
    throw new ShapeError(`The query has ${query.length} numbers and the keys ${headDim}.`, {
      subject: 'query',
      given: query.length,
      wanted: headDim,
    });
  }
  const weights = new Float64Array(tokens);
  let greatest = -Infinity;
  for (let token = 0; token < tokens; token += 1) {
    let sum = 0;
    for (let dim = 0; dim < headDim; dim += 1) sum += at(query, dim) * at(keys, token * headDim + dim);
    weights[token] = scale * sum;
    greatest = Math.max(greatest, scale * sum);
  }
  let total = 0;
  for (let token = 0; token < tokens; token += 1) {
    weights[token] = Math.exp(at(weights, token) - greatest);
    total += at(weights, token);
  }
  return weights.map((weight) => weight / total);
}

/**
 * The output of an attention that sees only `kept`, its weights made to sum to one again:
 * `y = Σ_{i∈S} a_i v_i / Σ_{i∈S} a_i`, in f64.
 * @param kept which tokens, `S`; default all
 * @throws ShapeError when keys and values are not whole rows; InvalidValueError unless each token has a finite weight
 */
export function attentionOutput(
  weights: Float64Array,
  cache: HeadCache,
  kept?: Iterable<number>,
): Float64Array {
  const tokens = countTokens(cache);
  const { values, headDim } = cache;
  const all = numbersOf('attentionOutput', 'weights', weights);
  expectThat('attentionOutput', 'weights', weights, all.length === tokens, `a weight of each of ${tokens} tokens`);
  const output = new Float64Array(headDim);
  let total = 0;
  for (const token of kept === undefined ? all.keys() : positionsOf('attentionOutput', kept, tokens)) {
    const weight = all[token] ?? NaN;
    total += weight;
    for (let dim = 0; dim < headDim; dim += 1) {
      output[dim] = at(output, dim) + weight * at(values, token * headDim + dim);
    }
  }
  return output.map((sum) => sum / total);
}

function at(numbers: Float32Array | Float64Array, index: number): number {
  return numbers[index] ?? NaN;
}
