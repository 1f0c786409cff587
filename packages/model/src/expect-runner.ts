import { expectThat } from '@kv/sparse-core/native';

import { Runner } from './runner/runner.js';

/** @throws InvalidValueError unless it is one of `Model.createRunner` */
export function expectRunner(operation: string, given: unknown): asserts given is Runner {
  expectThat(operation, 'runner', given, Runner.is(given), 'a runner of model.createRunner()');
}
