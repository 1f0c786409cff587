import type { TokenSelection } from '../contracts/token-selection.js';
import { InvalidValueError } from '../errors.js';
import { show } from '../show.js';
import { expectObject, listFor } from '../validate.js';

/**
 * A store frees blocks by what the host says is kept, so that no kv head can keep more than it holds.
 * @throws InvalidValueError, ShapeError
 */
export function expectHeld(selection: TokenSelection, lengths: readonly number[]): void {
  expectObject('keep', 'selection', selection);
  const counts = listFor('keep', 'counts', selection.counts, 'kvHead', lengths.length);
  for (const [kvHead, held] of lengths.entries()) {
    const kept = counts[kvHead] ?? NaN;
    if (Number.isInteger(kept) && kept >= 0 && kept <= held) continue;
    throw new InvalidValueError(
      `keep: the selection keeps ${show(kept)} tokens of kv head ${kvHead}, which holds ${held}; give a whole number to ${held}.`,
      { subject: 'counts', given: kept, wanted: [0, held] },
    );
  }
}
