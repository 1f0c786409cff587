import type { TokenSelection } from '../contracts/token-selection.js';
import { InvalidValueError } from '../errors.js';

/**
 * A store frees blocks by what the host says is kept, so that no kv head can keep more than it holds.
 * @throws InvalidValueError
 */
export function expectHeld({ counts }: TokenSelection, lengths: readonly number[]): void {
  for (const [kvHead, held] of lengths.entries()) {
    const kept = counts[kvHead] ?? NaN;
    if (Number.isInteger(kept) && kept >= 0 && kept <= held) continue;
    throw new InvalidValueError(
      `keep: the selection keeps ${kept} tokens of kv head ${kvHead}, which holds ${held}; give a whole number to ${held}.`,
      { subject: 'counts', given: kept, wanted: [0, held] },
    );
  }
}
