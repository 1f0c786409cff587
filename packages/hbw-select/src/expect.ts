import { expectThat } from '@kv/sparse-core/native';

const largest = 2 ** 31 - 1;

/** @throws InvalidValueError unless it is one of the choices */
export function expectChoice(operation: string, name: string, given: string, choices: readonly string[]): void {
  expectThat(operation, name, given, choices.includes(given), choices.map((choice) => `'${choice}'`).join(' or '));
}

/** @throws InvalidValueError unless it is a whole number from `least` on that fits in an i32 */
export function expectWhole(operation: string, name: string, given: number, least = 0): void {
  const holds = Number.isInteger(given) && given >= least && given <= largest;
  expectThat(operation, name, given, holds, `a whole number from ${least} on`);
}
