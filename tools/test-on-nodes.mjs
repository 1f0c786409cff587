// Runs the whole suite, as built by this Node, on newer Node releases too. They come from npm.
import { spawnSync } from 'node:child_process';
import { delimiter, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { fetchNode } from './fetch-node.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
const versions = ['22.23.3', '24.21.0'];

const summaries = versions.map((version) => {
  const bin = fetchNode(version);
  console.log(`\nNode ${version}`);
  const { status } = spawnSync(join(bin, 'node'), ['tools/test.mjs'], {
    cwd: root,
    stdio: 'inherit',
    env: { ...process.env, PATH: `${bin}${delimiter}${process.env.PATH}` },
  });
  return { version, passed: status === 0 };
});
console.log('');
for (const { version, passed } of summaries) console.log(`Node ${version}: ${passed ? 'passed' : 'FAILED'}`);
process.exitCode = summaries.every(({ passed }) => passed) ? 0 : 1;
