// Runs every test of every package, then adds up the packages' reports.
import { spawnSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const reports = join(root, 'build/test-reports');
rmSync(reports, { recursive: true, force: true });

const { status } = spawnSync(
  process.execPath,
  ['node_modules/nx/dist/bin/nx.js', 'run-many', '-t', 'test', '--parallel=1', '--nx-bail=false'],
  { cwd: root, stdio: 'inherit', env: { ...process.env, NX_DAEMON: 'false', NX_NO_CLOUD: 'true' } },
);

let passed = 0;
let failed = 0;
let skipped = 0;
const tested = readdirSync(join(root, 'packages')).filter((name) =>
  existsSync(join(root, 'packages', name, 'vitest.config.ts')),
);
for (const name of tested) {
  const file = join(reports, `${name}.json`);
  if (!existsSync(file)) {
    console.error(`${name}: no test report, so its run counts as one failure`);
    failed += 1;
    continue;
  }
  const report = JSON.parse(readFileSync(file, 'utf8'));
  passed += report.numPassedTests;
  failed += report.numFailedTests;
  skipped += report.numPendingTests + report.numTodoTests;
  // A file that could not be loaded has failed, though it names no test.
  failed += report.testResults.filter((each) => each.status === 'failed' && each.assertionResults.length === 0).length;
}
console.log(`${passed} passed, ${failed} failed, ${skipped} skipped`);
process.exitCode = status === 0 && failed === 0 ? 0 : 1;
