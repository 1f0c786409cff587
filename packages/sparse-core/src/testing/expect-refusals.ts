import { expect } from 'vitest';
import type { Stream } from '../handles.js';

/** Each of these changes of good arguments makes the operation throw an error of that class, before anything is enqueued. */
export function expectRefusals<Args extends object>(
  operation: (stream: Stream, args: Args) => void,
  stream: Stream,
  good: NoInfer<Args>,
  refusals: readonly (readonly [change: { readonly [Name in keyof Args]?: unknown }, error: new (...args: never[]) => Error])[],
): void {
  for (const [change, error] of refusals) {
    expect(() => {
      operation(stream, { ...good, ...change });
    }, Object.keys(change).join(', ')).toThrow(error);
  }
}
