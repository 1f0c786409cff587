/** Arithmetic of plain numbers, for oracles. */

export function dot(a: ArrayLike<number>, b: ArrayLike<number>): number {
  let sum = 0;
  for (let index = 0; index < a.length; index++) sum += (a[index] ?? NaN) * (b[index] ?? NaN);
  return sum;
}

/** Adds `factor` times a vector to another. */
export function add(to: Float64Array, vector: ArrayLike<number>, factor = 1): void {
  for (let index = 0; index < to.length; index++) to[index] = (to[index] ?? NaN) + factor * (vector[index] ?? NaN);
}

export function minus(a: ArrayLike<number>, b: ArrayLike<number>): Float64Array {
  const difference = new Float64Array(a);
  add(difference, b, -1);
  return difference;
}

/** `[0]` is 0 and `[n]` the sum of the first n. */
export function runningSums(values: ArrayLike<number>): Float64Array {
  const sums = new Float64Array(values.length + 1);
  for (let index = 0; index < values.length; index++) sums[index + 1] = (sums[index] ?? NaN) + (values[index] ?? NaN);
  return sums;
}

/** ln(Σ e^x), which cannot overflow. */
export function logSumExp(logarithms: readonly number[]): number {
  const peak = logarithms.reduce((most, x) => Math.max(most, x), -Infinity);
  if (!Number.isFinite(peak)) return peak;
  return peak + Math.log(logarithms.reduce((sum, x) => sum + Math.exp(x - peak), 0));
}
