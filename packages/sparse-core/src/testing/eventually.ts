import { setTimeout } from 'node:timers/promises';

/** For what comes by itself: longer than it takes on a busy machine. */
const longest = 60_000;

/** Waits until it holds, or for a minute: whoever asks then says what it is that does not. */
export async function eventually(holds: () => boolean): Promise<void> {
  const end = performance.now() + longest;
  while (!holds() && performance.now() < end) await setTimeout(5);
}
