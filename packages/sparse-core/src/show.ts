import { inspect } from 'node:util';

/** A value of any kind for a message, on one short line. Runs no code of the value's. */
export function show(value: unknown): string {
  const text = inspect(value, {
    breakLength: Infinity,
    compact: true,
    customInspect: false,
    depth: 1,
    maxArrayLength: 8,
    maxStringLength: 80,
  });
  return text.length <= 200 ? text : `${text.slice(0, 200)} …`;
}
