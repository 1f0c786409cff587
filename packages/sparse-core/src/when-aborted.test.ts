import { getEventListeners } from 'node:events';

import { expect, it } from 'vitest';

import { whenAborted } from './when-aborted.js';

it('tells all who listen and have not stopped, by one listener of the signal', () => {
  const { signal, ...controller } = withSignal();
  const told: number[] = [];
  const stops = Array.from({ length: 20 }, (_, index) => whenAborted(signal, () => told.push(index)));
  expect(getEventListeners(signal, 'abort')).toHaveLength(1);
  for (const stop of stops.slice(2)) stop();
  controller.abort();
  expect(told).toEqual([0, 1]);
});

it('leaves nothing at a signal that nobody listens to any more, and listens again', () => {
  const { signal, ...controller } = withSignal();
  const stop = whenAborted(signal, () => undefined);
  stop();
  stop();
  expect(getEventListeners(signal, 'abort')).toHaveLength(0);
  let told = 0;
  const stopAgain = whenAborted(signal, () => (told += 1));
  stop();
  expect(getEventListeners(signal, 'abort')).toHaveLength(1);
  controller.abort();
  stopAgain();
  expect(told).toBe(1);
  expect(getEventListeners(signal, 'abort')).toHaveLength(0);
});

function withSignal(): { readonly signal: AbortSignal; readonly abort: () => void } {
  const controller = new AbortController();
  return { signal: controller.signal, abort: () => controller.abort() };
}
