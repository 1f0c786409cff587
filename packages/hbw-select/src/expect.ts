import { InvalidValueError } from '@kv/sparse-core';
import { show } from '@kv/sparse-core/native';

const largest = 2 ** 31 - 1;

/** @throws InvalidValueError unless it holds */
export function expectThat(holds: boolean, name: string, given: unknown, wanted: string): void {
  if (holds) return;
  throw new InvalidValueError(`${name} is ${show(given)}; it must be ${wanted}.`, { subject: name, given, wanted });
}

/** @throws InvalidValueError unless it is one of the choices */
export function expectChoice(name: string, given: string, choices: readonly string[]): void {
  expectThat(choices.includes(given), name, given, choices.map((choice) => `'${choice}'`).join(' or '));
}

/** @throws InvalidValueError unless it is a whole number that fits in an i32 */
export function expectWhole(name: string, given: number): void {
  const holds = Number.isInteger(given) && given >= 0 && given <= largest;
  expectThat(holds, name, given, 'a whole number from 0 on');
}

/** @throws InvalidValueError unless it is a whole number from 1 on that fits in an i32 */
export function expectPositive(name: string, given: number): void {
  const holds = Number.isInteger(given) && given > 0 && given <= largest;
  expectThat(holds, name, given, 'a whole number from 1 on');
}
