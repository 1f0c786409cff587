// Runs one test file in a process of its own and sends its parent what came out.
import { fileURLToPath, pathToFileURL } from 'node:url';
import { startTests } from 'vitest';

const [file, pattern] = process.argv.slice(2);
const report = { passed: 0, failed: 0, skipped: 0, failures: [] };

function fail(name, result) {
  report.failed += 1;
  report.failures.push({ name, messages: (result?.errors ?? []).map((error) => error.stack ?? error.message) });
}

/** Adds up the tests below a suite; `path` names it. */
function count(suite, path) {
  for (const task of suite.tasks) {
    const name = `${path} > ${task.name}`;
    if (task.type === 'suite') count(task, name);
    else if (task.result?.state === 'pass') report.passed += 1;
    else if (task.result?.state === 'fail') fail(name, task.result);
    else report.skipped += 1;
  }
  // A suite whose own code or hook threw has failed, whatever its tests did.
  if (suite.result?.errors?.length > 0) fail(path, suite.result);
}

const config = {
  root: process.cwd(),
  setupFiles: [fileURLToPath(new URL('vitest.setup.mjs', import.meta.url))],
  name: undefined,
  passWithNoTests: false,
  testNamePattern: pattern === undefined ? undefined : new RegExp(pattern),
  allowOnly: false,
  sequence: { seed: 1, hooks: 'stack', setupFiles: 'list' },
  chaiConfig: undefined,
  maxConcurrency: 5,
  testTimeout: 600_000,
  hookTimeout: 60_000,
  retry: 0,
  // All lines of two large arrays that differ throughout would take hours to compare.
  diffOptions: { truncateThreshold: 1000 },
  includeTaskLocation: false,
  tags: [],
  tagsFilter: undefined,
  strictTags: false,
};
const [suite] = await startTests([file], { config, importFile: (path) => import(pathToFileURL(path)) });
count(suite, suite.name);
process.send(report, () => process.exit());
