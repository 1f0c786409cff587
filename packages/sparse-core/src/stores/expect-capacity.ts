import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import { InvalidValueError, ShapeError } from '../errors.js';

/**
 * What every store relies on: counts above 0, and heads of one size.
 * @throws InvalidValueError, ShapeError
 */
export function expectCapacity(
  layers: readonly KvLayer[],
  { slots, tokensPerSlot, tokens, batchRows = tokens }: KvCapacity,
): void {
  for (const [subject, given] of Object.entries({ slots, tokensPerSlot, tokens, batchRows })) {
    if (Number.isSafeInteger(given) && given > 0) continue;
    throw new InvalidValueError(`${subject} of a cache is ${given}; it must be a whole number above 0.`, {
      subject,
      given,
    });
  }
  for (const { index, queryHeads, kvHeads } of layers) {
    if (Number.isSafeInteger(kvHeads) && kvHeads > 0 && queryHeads % kvHeads === 0) continue;
    throw new ShapeError(
      `Layer ${index} has ${kvHeads} kv heads and ${queryHeads} query heads; the first must divide the second.`,
      { subject: 'kvHeads', given: kvHeads, wanted: queryHeads },
    );
  }
  const headDims = [...new Set(layers.map(({ headDim }) => headDim))];
  if (headDims.length > 1) {
    throw new ShapeError(
      `The layers have heads of ${headDims.join(', ')} dims; those of one cache must have the same headDim.`,
      { subject: 'headDim', given: headDims },
    );
  }
}
