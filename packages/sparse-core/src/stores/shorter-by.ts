import { InvalidValueError } from '../errors.js';
import { show } from '../show.js';

/**
 * The tokens of each kv head of a slot without the newest.
 * @throws InvalidValueError when a kv head holds fewer
 */
export function shorterBy(operation: string, lengths: readonly number[], tokens: number): number[] {
  const most = Math.min(...lengths);
  if (Number.isInteger(tokens) && tokens >= 0 && tokens <= most) return lengths.map((count) => count - tokens);
  throw new InvalidValueError(`${operation}: ${show(tokens)} tokens to forget; it must be a whole number to ${most}, what the slot holds.`, {
    subject: 'tokens',
    given: tokens,
    wanted: [0, most],
  });
}
