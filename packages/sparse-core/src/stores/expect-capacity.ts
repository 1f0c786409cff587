import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import { InvalidValueError, ShapeError } from '../errors.js';

/** Slots and positions are i32 on the device. */
const maxIndex = 2 ** 31 - 1;

/**
 * What every store relies on: counts above 0, slots and positions that are i32, and heads of one size.
 * @throws InvalidValueError, ShapeError
 */
export function expectCapacity(
  layers: readonly KvLayer[],
  { slots, tokensPerSlot, tokens, batchRows = tokens }: KvCapacity,
): void {
  for (const [subject, given] of Object.entries({ slots, tokensPerSlot, tokens, batchRows })) {
    const most = subject === 'slots' || subject === 'tokensPerSlot' ? maxIndex : Number.MAX_SAFE_INTEGER;
    if (Number.isInteger(given) && given > 0 && given <= most) continue;
    throw new InvalidValueError(`${subject} of a cache is ${given}; it must be a whole number from 1 to ${most}.`, {
      subject,
      given,
      wanted: [1, most],
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
