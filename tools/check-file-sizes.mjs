// Fails when a native source or a script is too long to read at one go. (ESLint holds TypeScript to the same.)
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const sources = ['*.cc', '*.h', '*.cu', '*.cuh', '*.cmake', '*.sh', '*.py', '*CMakeLists.txt'];
const files = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '--', ...sources], {
  cwd: root,
  encoding: 'utf8',
});

let problems = 0;
for (const file of files.split('\n').filter(Boolean)) {
  const most = file.startsWith('native/kernels/') ? 700 : 500;
  const lines = readFileSync(new URL(`../${file}`, import.meta.url), 'utf8').split('\n').length - 1;
  if (lines <= most) continue;
  console.error(`check-file-sizes: ${file} has ${lines} lines; split it below ${most}`);
  problems += 1;
}
process.exitCode = problems === 0 ? 0 : 1;
