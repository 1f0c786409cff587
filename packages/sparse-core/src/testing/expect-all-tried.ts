import { expect } from 'vitest';
import type { MisusedFunction } from './misuse.js';

/** What users of a package can call: its functions, its classes, and their methods as `Class.method`. */
function callablesOf(exported: object): string[] {
  return Object.entries(exported).flatMap(([name, value]: [string, unknown]) => {
    if (typeof value !== 'function' || value.prototype instanceof Error) return [];
    const methods = [...methodsOf(value), ...methodsOf(value.prototype as object | undefined)];
    return [name, ...methods.map((method) => `${name}.${method}`)];
  });
}

function methodsOf(owner: object | undefined): string[] {
  const all = Object.entries(Object.getOwnPropertyDescriptors(owner ?? {}));
  return all.filter(([name, { value }]) => typeof value === 'function' && name !== 'constructor').map(([name]) => name);
}

/**
 * Every function, class and method that is exported is misused in a table or says why it needs none, and nothing says so
 * that is not there.
 */
export function expectAllTried(exported: object, tried: readonly MisusedFunction[], untried: Readonly<Record<string, string>>): void {
  const callables = callablesOf(exported);
  const covered = new Set([...tried.map(({ name }) => name), ...Object.keys(untried)]);
  expect(callables.filter((name) => !covered.has(name)), 'in no table of misuse').toEqual([]);
  expect(Object.keys(untried).filter((name) => !callables.includes(name)), 'is not exported').toEqual([]);
}
