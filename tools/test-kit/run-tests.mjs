// Runs the kit's test files: all of them, or those whose path holds one of the words given. With `-t PATTERN`,
// only the tests whose full name matches the regular expression. Ends with the counts.
import { fork } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const kit = fileURLToPath(new URL('.', import.meta.url));
const { values, positionals } = parseArgs({
  options: { 'test-name-pattern': { type: 'string', short: 't' } },
  allowPositionals: true,
});
const pattern = values['test-name-pattern'];
const files = readdirSync(join(kit, 'packages'), { recursive: true })
  .filter((name) => name.endsWith('.test.js'))
  .map((name) => join(kit, 'packages', name))
  .filter((file) => positionals.length === 0 || positionals.some((word) => relative(kit, file).includes(word)))
  .sort();

/** For all temporary files of the tests. */
const scratch = mkdtempSync(join(tmpdir(), 'kv-tests-'));
const env = { ...process.env, TMPDIR: scratch };

/** One process for each file: a crash of native code then fails one file and not the run. */
function run(file) {
  return new Promise((resolve) => {
    const started = performance.now();
    const child = fork(join(kit, 'run-file.mjs'), pattern === undefined ? [file] : [file, pattern], { silent: true, env });
    let output = '';
    let report;
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (data) => (output += data));
    child.on('message', (message) => (report = message));
    child.on('close', (code, signal) => {
      const crash = { passed: 0, failed: 1, skipped: 0, failures: [] };
      const crashed = report === undefined || code !== 0;
      if (crashed) crash.failures.push({ name: `ended with ${signal ?? code}`, messages: [] });
      const seconds = (performance.now() - started) / 1000;
      resolve({ file: relative(kit, file), seconds, output, ...(crashed ? crash : report) });
    });
  });
}

const totals = { passed: 0, failed: 0, skipped: 0 };

function print({ file, seconds, output, failures, ...counts }) {
  const { passed, failed, skipped } = counts;
  for (const key of Object.keys(totals)) totals[key] += counts[key];
  console.log(`${file}: ${passed} passed, ${failed} failed, ${skipped} skipped in ${seconds.toFixed(1)} s`);
  for (const { name, messages } of failures) console.log(`  FAILED ${name}\n${messages.join('\n')}`);
  if (failed > 0 && output !== '') console.log(output);
}

// Every file has threads of its own, and its device's memory.
const workers = Math.max(1, Math.min(4, availableParallelism() >> 1));
await Promise.all(
  Array.from({ length: workers }, async () => {
    for (let file = files.shift(); file !== undefined; file = files.shift()) print(await run(file));
  }),
);
rmSync(scratch, { recursive: true, force: true });
console.log(`tests: ${totals.passed} passed, ${totals.failed} failed, ${totals.skipped} skipped`);
process.exitCode = totals.failed === 0 && totals.passed > 0 ? 0 : 1;
