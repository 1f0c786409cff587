/**
 * `Σ p ln(p / q)` with `p = softmax(reference)`, `q = softmax(given)`, in nats: what is lost when one vector of logits
 * stands for another. In f64, and finite for finite logits.
 * @param reference `[vocabulary]`
 * @param given `[vocabulary]`
 */
export function logitDivergence(reference: Float32Array, given: Float32Array): number {
  const [referenceTotal, givenTotal] = [logSumExp(reference), logSumExp(given)];
  let sum = 0;
  for (const [token, logit] of reference.entries()) {
    const logProbability = logit - referenceTotal;
    sum += Math.exp(logProbability) * (logProbability - ((given[token] ?? NaN) - givenTotal));
  }
  // Rounding may leave less than nothing of two equal distributions.
  return Math.max(0, sum);
}

function logSumExp(logits: Float32Array): number {
  const greatest = logits.reduce((most, logit) => Math.max(most, logit), -Infinity);
  return greatest + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - greatest), 0));
}
