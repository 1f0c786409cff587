// What the test files import as 'vitest' in the kit: vitest's own runner and assertions, without its bundler and
// file server. Bundled into one file by tools/pack-test-kit.mjs.
import { setTimeout } from 'node:timers/promises';
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
import { spyOn } from '@vitest/spy';
import * as chai from 'chai';

export { afterAll, afterEach, beforeAll, beforeEach, describe, it, startTests, test } from '@vitest/runner';

export const vi = { spyOn };

chai.use(JestExtend);
chai.use(JestChaiExpect);
chai.use(JestAsymmetricMatchers);

/** `await expect.poll(read).toBe(…)`: looks again until the matcher is content, for a second. */
function poll(read) {
  const matched = (matcher) => async (...args) => {
    for (const begun = performance.now(); ; ) {
      try {
        return expect(await read())[matcher](...args);
      } catch (error) {
        if (performance.now() - begun > 1000) throw error;
        await setTimeout(20);
      }
    }
  };
  return new Proxy({}, { get: (_, matcher) => matched(matcher) });
}

export const expect = (value, message) => chai.expect(value, message);
Object.assign(expect, chai.expect, globalThis[ASYMMETRIC_MATCHERS_OBJECT], {
  addEqualityTesters: addCustomEqualityTesters,
  getState: () => getState(expect),
  setState: (state) => setState(state, expect),
  poll,
});
globalThis[GLOBAL_EXPECT] = expect;
expect.setState({ assertionCalls: 0, isExpectingAssertions: false, expectedAssertionsNumber: null });
