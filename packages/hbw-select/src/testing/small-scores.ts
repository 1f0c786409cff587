/** ln of the smallest normal number of f32. Below it, scores are as `native/shared/scores/small-scores.h` says. */
export const smallestNormal = Math.log(2 ** -126);

/** ln of what an f32 score stands for. */
export function logOf(score: number): number {
  if (score === 0 || score >= 2 ** -126) return Math.log(score);
  const power = -126 * (2 ** -126 / score);
  const whole = Math.floor(power);
  return whole * Math.LN2 + Math.log1p(power - whole);
}

/** How far apart, as logarithms, two small scores that follow one another may be around `logarithm`. */
export function stepOfSmall(logarithm: number): number {
  // n stands for 2^(-126 2^23 / n), whose exponent changes by 126 2^23 / n² = exponent² / (126 2^23) from one n to the
  // next; the exponent itself is an f32 number. A linear piece of a logarithm is steeper than it by 1 / ln 2 at most.
  const exponent = logarithm / Math.LN2 - 1;
  return exponent ** 2 / (126 * 2 ** 23) + Math.abs(exponent) * 2 ** -23;
}
