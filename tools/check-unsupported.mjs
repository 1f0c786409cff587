// Where @kv does not run, every entry must say so in one clear line: on a Node that is too old (a real one), and on
// platforms without a binary (this one, under another name). Needs built packages.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { fetchNode } from './fetch-node.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
const oldNode = '18.20.8';

const packages = readdirSync(join(root, 'packages')).filter((name) =>
  existsSync(join(root, 'packages', name, 'tsup.config.ts')),
);
const { scripts } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8'));
const model = 'models/needle-8m';

const imports = packages.flatMap((name) => [
  ['-e', `import('@kv/${name}').catch(({ message }) => { console.error(message); process.exitCode = 1; })`],
  ['-e', `try { require('@kv/${name}'); } catch ({ message }) { console.error(message); process.exitCode = 1; }`],
]);
const bin = 'packages/cli/dist/bin.js';
const opensDevice = `require('@kv/model').createDevice()`;
// The first command of a script decides whether the others run.
const started = ['start', 'test'].map((name) => scripts[name].split(' && ')[0].split(' ').slice(1));

let failed = 0;
let tried = 0;

function check(name, [node, ...flags], args, pattern) {
  tried += 1;
  const { status, stdout, stderr } = spawnSync(node, [...flags, ...args], {
    cwd: root,
    encoding: 'utf8',
  });
  const lines = `${stdout}${stderr}`.trimEnd().split('\n');
  if (status === 1 && lines.length === 1 && pattern.test(lines[0])) return;
  failed += 1;
  console.error(`check-unsupported: ${name}: ${args.join(' ')} ended with ${status} and said\n${lines.join('\n')}`);
}

const old = [join(fetchNode(oldNode), 'node')];
for (const args of [...imports, [bin, 'doctor'], [bin], ...started]) {
  check(`Node ${oldNode}`, old, args, /Node 18\.20\.8 is too old.*install Node 20\.19 or newer\.$/);
}

mkdirSync(join(root, 'build'), { recursive: true });
for (const [platform, arch] of [['darwin', 'arm64'], ['win32', 'x64']]) {
  const disguise = join(root, `build/as-${platform}.cjs`);
  const values = Object.entries({ platform, arch }).map(([key, value]) => `${key}: { value: '${value}' }`);
  writeFileSync(disguise, `Object.defineProperties(process, { ${values.join(', ')} });\n`);
  const node = [process.execPath, '--require', disguise];
  const caught = `try { ${opensDevice}; } catch ({ message }) { console.error(message); process.exitCode = 1; }`;
  const runs = [[bin, 'generate', model, '--prompt', 'a'], ['-e', caught], ...started];
  for (const args of runs) check(`${platform}-${arch}`, node, args, new RegExp(`${platform}.*Linux`));
}

console.log(`check-unsupported: ${tried - failed} passed, ${failed} failed`);
process.exitCode = failed === 0 ? 0 : 1;
