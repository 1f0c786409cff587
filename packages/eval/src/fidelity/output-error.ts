import { sum } from './numbers.js';

type Vector = ArrayLike<number>;

/** `‖ỹ − y‖ / ‖y‖` */
export function relativeError(output: Vector, reference: Vector): number {
  return norm(difference(output, reference)) / norm(Array.from(reference));
}

/** `⟨ỹ, y⟩ / (‖ỹ‖ ‖y‖)`: tells a wrong direction from a wrong length. */
export function cosineSimilarity(output: Vector, reference: Vector): number {
  const product = sum(Array.from(output, (value, dim) => value * (reference[dim] ?? NaN)));
  return product / (norm(Array.from(output)) * norm(Array.from(reference)));
}

/** `‖ỹ − y‖ / ‖y − v̄‖`, v̄ the mean of the values: plain error flatters where that mean is large. */
export function centredError(output: Vector, reference: Vector, meanValue: Vector): number {
  return norm(difference(output, reference)) / norm(difference(reference, meanValue));
}

/** Root mean square of `(z̃ − mean z̃) − (z − mean z)`: a softmax does not see what shifts all logits alike. */
export function centredLogitError(logits: Vector, reference: Vector): number {
  const errors = difference(logits, reference);
  const shift = sum(errors) / errors.length;
  return Math.sqrt(sum(errors.map((error) => (error - shift) ** 2)) / errors.length);
}

function difference(one: Vector, other: Vector): number[] {
  return Array.from(one, (value, dim) => value - (other[dim] ?? NaN));
}

function norm(vector: readonly number[]): number {
  return Math.sqrt(sum(vector.map((value) => value * value)));
}
