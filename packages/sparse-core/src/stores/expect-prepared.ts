import type { KvStore } from '../contracts/kv-store.js';
import { entriesOf, type RowBatch } from '../contracts/row-batch.js';
import { InvalidValueError } from '../errors.js';

/**
 * Rows that have no blocks of their own would be written over others'.
 * @param roomOf how many tokens the blocks of a slot's kv head hold
 * @throws InvalidValueError when a slot has no room for its rows
 */
export function expectPrepared(
  store: KvStore,
  batch: RowBatch,
  roomOf: (slot: number, kvHead: number) => number,
): void {
  for (const { slot, rows } of entriesOf('append', batch)) {
    for (const [kvHead, count] of store.lengths(slot).entries()) {
      const room = roomOf(slot, kvHead);
      if (count + rows <= room) continue;
      throw new InvalidValueError(
        `append: slot ${slot} has blocks for ${room} tokens and would hold ${count + rows}. ` +
          `Call prepare() of the store '${store.name}' with a step's batch before its append().`,
        { subject: 'append', given: count + rows, wanted: room },
      );
    }
  }
}
