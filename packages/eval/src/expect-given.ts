import { Runner, Tokenizer } from '@kv/model';
import { expectThat, listOf, reading } from '@kv/sparse-core/native';

/** More than any text has. */
const mostNumbers = 2 ** 26;

/**
 * Numbers that a caller gave, copied.
 * @throws InvalidValueError unless all are finite
 */
export function numbersOf(operation: string, name: string, given: ArrayLike<number>): number[] {
  const numbers = listOf(operation, name, given, mostNumbers);
  const wrong = numbers.findIndex((number) => !Number.isFinite(number));
  expectThat(operation, name, numbers[wrong], wrong === -1, 'finite numbers');
  return numbers;
}

/**
 * Positions that a caller gave, in any order, copied.
 * @throws InvalidValueError unless they are whole numbers from 0 to `tokens - 1`
 */
export function positionsOf(operation: string, given: Iterable<number>, tokens: number): number[] {
  return reading(`${operation}: kept`, () => {
    const positions: number[] = [];
    for (const position of given) {
      const isPosition = Number.isInteger(position) && position >= 0 && position < tokens && positions.length < mostNumbers;
      expectThat(operation, 'kept', position, isPosition, `whole numbers from 0 to ${tokens - 1}`);
      positions.push(position);
    }
    return positions;
  });
}

/** @throws InvalidValueError unless it is a whole number from `least` on */
export function expectCount(operation: string, name: string, given: number, least = 1): void {
  expectThat(operation, name, given, Number.isSafeInteger(given) && given >= least, `a whole number from ${least} on`);
}

/** @throws InvalidValueError unless it is one, and no proxy */
export function expectFloats(operation: string, name: string, given: unknown): void {
  expectThat(operation, name, given, ArrayBuffer.isView(given) && given instanceof Float32Array, 'a Float32Array');
}

/** @throws InvalidValueError unless it is one, and no proxy */
export function expectIds(operation: string, name: string, given: unknown): void {
  expectThat(operation, name, given, ArrayBuffer.isView(given) && given instanceof Int32Array, 'an Int32Array of token ids');
}

/** @throws InvalidValueError */
export function expectRunner(operation: string, given: unknown): void {
  expectThat(operation, 'runner', given, Runner.is(given), 'a runner of model.createRunner()');
}

/** @throws InvalidValueError */
export function expectTokenizer(operation: string, given: unknown): void {
  expectThat(operation, 'tokenizer', given, Tokenizer.is(given), 'the tokenizer of a model');
}
