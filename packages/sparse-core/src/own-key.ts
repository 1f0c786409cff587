import { InvalidValueError } from './errors.js';

/** Only this package's own functions have it: what was checked of an object holds because they made it. */
export const ownKey = Symbol('made by @kv/sparse-core');

/** @throws InvalidValueError when a constructor was called from outside */
export function expectOwnKey(key: unknown, name: string, maker: string): void {
  if (key === ownKey) return;
  throw new InvalidValueError(`${name} cannot be made of parts; call ${maker}.`, { subject: name, wanted: maker });
}
