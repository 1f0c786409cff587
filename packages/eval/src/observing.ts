import type { KvSelector } from '@kv/sparse-core';

/** Keeps every token, and the last queries at hand for the selections of forks. */
export function observing(observationWindow: number): KvSelector {
  return { name: 'observing', observationWindow, select: () => undefined };
}
