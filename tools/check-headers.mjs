// A header's suffix says where it compiles: `.cpu.h` in a CPU kernel, `.cuda.h` under nvcc, any other everywhere.
// Fails when a header includes what does not compile there, when files lie loose among the operations' folders, and when
// code depends on the GPU's architecture outside of native/ptx and native/shared/prefill-block-scores.
import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const problems = [];

function compilesWhere(header) {
  if (header.endsWith('.cpu.h')) return 'cpu';
  if (header.endsWith('.cuda.h') || /^(cuda|cooperative_groups|cublas)/.test(header)) return 'cuda';
  return 'everywhere';
}

const files = execFileSync('git', ['ls-files', '--cached', '--others', '--exclude-standard', '--', 'native'], {
  cwd: root,
  encoding: 'utf8',
});
const headers = files.split('\n').filter((file) => file.endsWith('.h') && !file.startsWith('native/tests/'));

for (const header of headers) {
  const where = compilesWhere(header);
  // What stands between #if and #endif is the header's own affair.
  const text = readFileSync(new URL(`../${header}`, import.meta.url), 'utf8').replace(/^#if[^]*?^#endif/gm, '');
  for (const [, included] of text.matchAll(/^#include [<"](.+)[>"]/gm)) {
    const needs = compilesWhere(included);
    if (needs === 'everywhere' || needs === where) continue;
    problems.push(`${header} includes ${included}: end its name in .${needs}.h, or include less`);
  }
  if (where === 'everywhere' && /\b__(device|global)__\b/.test(text)) problems.push(`${header} is device code: end its name in .cuda.h`);
}

const common = files.split('\n').filter((file) => /\.(h|cu)$/.test(file) && !/^native\/(ptx|shared\/prefill-block-scores)\//.test(file));
for (const file of common) {
  const text = readFileSync(new URL(`../${file}`, import.meta.url), 'utf8');
  if (/__CUDA_ARCH(_FEAT|__ *[<>=])/.test(text)) problems.push(`${file} depends on the architecture: wrap the instruction in native/ptx`);
}

for (const { name } of readdirSync(new URL('../native/kernels', import.meta.url), { withFileTypes: true }).filter((entry) => !entry.isDirectory())) {
  problems.push(`native/kernels/${name} belongs to an operation's folder or to native/shared`);
}

for (const problem of problems) console.error(`check-headers: ${problem}`);
console.log(`check-headers: ${headers.length} headers, ${problems.length} problems`);
process.exitCode = problems.length === 0 ? 0 : 1;
