import { expectCount, numbersOf, positionsOf } from '../expect-given.js';
import { sum } from './numbers.js';

type Numbers = ArrayLike<number>;

/**
 * The share of a query's attention that the kept tokens hold: `m(S) = Σ_{i∈S} a_i`.
 * @throws InvalidValueError unless weights are finite, and positions of them
 */
export function capturedMass(weights: Numbers, kept: Iterable<number>): number {
  const all = numbersOf('capturedMass', 'weights', weights);
  return sum(positionsOf('capturedMass', kept, all.length).map((token) => all[token] ?? NaN));
}

/**
 * `m(S) / m(top-|S|)`, in [0, 1]: how near a selection comes to the best one of its size for this query.
 * @throws InvalidValueError unless weights are finite, and positions of them
 */
export function massEfficiency(weights: Numbers, kept: readonly number[]): number {
  const captured = capturedMass(weights, kept);
  return captured / capturedMass(weights, topTokens(weights, kept.length));
}

/**
 * `|S ∩ top-k| / k`: how many of the k tokens of greatest weight were kept.
 * @throws InvalidValueError unless weights are finite, and positions of them, and k a whole number from 1 on
 */
export function topRecall(weights: Numbers, kept: Iterable<number>, k: number): number {
  const all = numbersOf('topRecall', 'weights', weights);
  expectCount('topRecall', 'k', k);
  const held = new Set(positionsOf('topRecall', kept, all.length));
  return topTokens(all, k).filter((token) => held.has(token)).length / k;
}

/**
 * `Σ a_i ln(a_i / ã_i)`: what approximate weights lose. Infinite where they miss a token altogether.
 * @throws InvalidValueError unless all are finite
 */
export function klDivergence(weights: Numbers, approximate: Numbers): number {
  const others = numbersOf('klDivergence', 'approximate', approximate);
  const all = numbersOf('klDivergence', 'weights', weights);
  return sum(all.map((weight, token) => (weight === 0 ? 0 : weight * Math.log(weight / (others[token] ?? 0)))));
}

/** The k tokens of greatest weight; of equal ones the first. */
function topTokens(weights: Numbers, k: number): number[] {
  const order = Array.from(weights, (_, token) => token);
  order.sort((one, other) => (weights[other] ?? 0) - (weights[one] ?? 0) || one - other);
  return order.slice(0, k);
}
