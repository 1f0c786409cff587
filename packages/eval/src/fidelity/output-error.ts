import { expectThat } from '@kv/sparse-core/native';

import { numbersOf } from '../expect-given.js';
import { sum } from './numbers.js';

type Vector = ArrayLike<number>;

/**
 * `‖ỹ − y‖ / ‖y‖`
 * @throws InvalidValueError unless both are lists of finite numbers, equally long
 */
export function relativeError(output: Vector, reference: Vector): number {
  const lost = norm(difference(output, reference));
  return lost / norm(Array.from(reference));
}

/**
 * `⟨ỹ, y⟩ / (‖ỹ‖ ‖y‖)`: tells a wrong direction from a wrong length.
 * @throws InvalidValueError unless both are lists of finite numbers, equally long
 */
export function cosineSimilarity(output: Vector, reference: Vector): number {
  const [one, other] = pair(output, reference);
  const product = sum(one.map((value, dim) => value * (other[dim] ?? NaN)));
  return product / (norm(one) * norm(other));
}

/**
 * `‖ỹ − y‖ / ‖y − v̄‖`, v̄ the mean of the values: plain error flatters where that mean is large.
 * @throws InvalidValueError unless all are lists of finite numbers, equally long
 */
export function centredError(output: Vector, reference: Vector, meanValue: Vector): number {
  return norm(difference(output, reference)) / norm(difference(reference, meanValue));
}

/**
 * Root mean square of `(z̃ − mean z̃) − (z − mean z)`: a softmax does not see what shifts all logits alike.
 * @throws InvalidValueError unless both are lists of finite numbers, equally long
 */
export function centredLogitError(logits: Vector, reference: Vector): number {
  const errors = difference(logits, reference);
  const shift = sum(errors) / errors.length;
  return Math.sqrt(sum(errors.map((error) => (error - shift) ** 2)) / errors.length);
}

function difference(one: Vector, other: Vector): number[] {
  const [numbers, others] = pair(one, other);
  return numbers.map((value, dim) => value - (others[dim] ?? NaN));
}

/** @throws InvalidValueError unless both are finite, and equally many */
function pair(one: Vector, other: Vector): [number[], number[]] {
  const both: [number[], number[]] = [numbersOf('a difference', 'vector', one), numbersOf('a difference', 'vector', other)];
  const [{ length }, { length: wanted }] = both;
  expectThat('a difference', 'length', length, length === wanted, `that of the other vector, ${wanted}`);
  return both;
}

function norm(vector: readonly number[]): number {
  return Math.sqrt(sum(vector.map((value) => value * value)));
}
