import type { KvSelector } from '@kv/sparse-core';

import { expectCount } from './expect-given.js';

/**
 * Keeps every token, and the last queries at hand for the selections of forks.
 * @throws InvalidValueError unless the window is a whole number from 0 on
 */
export function observing(observationWindow: number): KvSelector {
  expectCount('observing', 'observationWindow', observationWindow, 0);
  return { name: 'observing', observationWindow, select: () => undefined };
}
