// What the test files import as 'vitest' in the kit: vitest's own runner and assertions, without its bundler and
// file server. Bundled into one file by tools/pack-test-kit.mjs.
import {
  addCustomEqualityTesters,
  ASYMMETRIC_MATCHERS_OBJECT,
  getState,
  GLOBAL_EXPECT,
  JestAsymmetricMatchers,
  JestChaiExpect,
  JestExtend,
  setState,
} from '@vitest/expect';
import * as chai from 'chai';

export { afterAll, afterEach, beforeAll, beforeEach, describe, it, startTests, test } from '@vitest/runner';

chai.use(JestExtend);
chai.use(JestChaiExpect);
chai.use(JestAsymmetricMatchers);

export const expect = (value, message) => chai.expect(value, message);
Object.assign(expect, chai.expect, globalThis[ASYMMETRIC_MATCHERS_OBJECT], {
  addEqualityTesters: addCustomEqualityTesters,
  getState: () => getState(expect),
  setState: (state) => setState(state, expect),
});
globalThis[GLOBAL_EXPECT] = expect;
expect.setState({ assertionCalls: 0, isExpectingAssertions: false, expectedAssertionsNumber: null });
