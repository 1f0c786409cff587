import type { KvCapacity, KvLayer } from '../contracts/kv-store.js';
import { InvalidValueError, ShapeError } from '../errors.js';
import { isDevice } from '../own-objects.js';
import { show } from '../show.js';
import { expectObject, expectThat, listOf } from '../validate.js';

/** Slots and positions are i32 on the device. */
const maxIndex = 2 ** 31 - 1;
const mostLayers = 65_536;

/**
 * The layers, copied, and what every store relies on: counts above 0, slots and positions that are i32, and heads of one size.
 * @throws InvalidValueError, ShapeError
 */
export function expectCapacity(layers: readonly KvLayer[], capacity: KvCapacity): readonly KvLayer[] {
  expectObject('capacity', 'capacity', capacity);
  const { device, slots, tokensPerSlot, tokens, batchRows = tokens } = capacity;
  expectThat('capacity', 'device', device, isDevice(device), 'a device');
  for (const [subject, given] of Object.entries({ slots, tokensPerSlot, tokens, batchRows })) {
    const most = subject === 'slots' || subject === 'tokensPerSlot' ? maxIndex : Number.MAX_SAFE_INTEGER;
    if (Number.isInteger(given) && given > 0 && given <= most) continue;
    throw new InvalidValueError(`${subject} of a cache is ${show(given)}; it must be a whole number from 1 to ${most}.`, {
      subject,
      given,
      wanted: [1, most],
    });
  }
  const list = listOf('capacity', 'layers', layers, mostLayers);
  for (const layer of list) {
    expectObject('capacity', 'layers', layer);
    const { index, queryHeads, kvHeads, headDim } = layer;
    const counts = [kvHeads, queryHeads, headDim].every((count) => Number.isInteger(count) && count > 0 && count <= maxIndex);
    if (counts && Number.isInteger(index) && index >= 0 && queryHeads % kvHeads === 0) continue;
    throw new ShapeError(
      `Layer ${show(index)} has ${show(kvHeads)} kv heads and ${show(queryHeads)} query heads of ${show(headDim)} dims; ` +
        'these are positive whole numbers, the first divides the second, and the index counts from 0.',
      { subject: 'kvHeads', given: kvHeads, wanted: queryHeads },
    );
  }
  const headDims = [...new Set(list.map(({ headDim }) => headDim))];
  if (headDims.length > 1) {
    throw new ShapeError(
      `The layers have heads of ${headDims.join(', ')} dims; those of one cache must have the same headDim.`,
      { subject: 'headDim', given: headDims },
    );
  }
  return list;
}
