// A processor without AVX-512 must never meet a function compiled with it. Of the inline functions that several
// sources define the linker keeps any one copy, so an object built for a wider set may define none outside the
// namespace of that set; and what kernels are compiled for, the runtime must ask the processor for before it runs them.
// Reads the objects of the native build.
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const native = fileURLToPath(new URL('../native', import.meta.url));
const build = join(native, 'build/CMakeFiles');
let objects = 0;
let problems = 0;

const questions = readFileSync(join(native, 'runtime/isa.cc'), 'utf8').matchAll(
  /__builtin_cpu_supports\("([\w-]+)"\)|\bbit_(\w+)/g,
);
const asked = new Set([...questions].map(([, builtin, bit]) => (builtin ?? bit).toLowerCase()));
let compared = 0;
const flags = /^set\(isa_flags_\w+ (.*)\)/gm;
for (const [, list] of readFileSync(join(native, 'CMakeLists.txt'), 'utf8').matchAll(flags)) {
  for (const [, feature] of list.matchAll(/-m([\w-]+)/g)) {
    compared += 1;
    if (asked.has(feature)) continue;
    console.error(`check-instruction-sets: kernels are compiled with -m${feature}, which runtime/isa.cc does not ask for`);
    problems += 1;
  }
}
if (compared === 0) {
  console.error('check-instruction-sets: native/CMakeLists.txt names no instruction sets as it used to');
  problems += 1;
}
for (const isa of ['avx2', 'avx512', 'amx']) {
  const folder = join(build, `kernels_${isa}.dir`);
  if (!existsSync(folder)) continue;
  for (const file of readdirSync(folder, { recursive: true }).filter((name) => name.endsWith('.o'))) {
    objects += 1;
    const symbols = execFileSync('nm', ['--demangle', '--defined-only', join(folder, file)], { encoding: 'utf8' });
    for (const line of symbols.split('\n')) {
      // Weak and unique symbols are those that the linker merges.
      const merged = /^\S+ [WVu] (.*)/.exec(line)?.[1];
      // DW.ref: a pointer to the function that every language has for unwinding.
      if (merged === undefined || merged.includes(`kv::${isa}::`) || merged.startsWith('DW.ref.')) continue;
      console.error(`check-instruction-sets: ${file} (${isa}) defines ${merged} for everyone`);
      problems += 1;
    }
  }
}
console.log(`check-instruction-sets: ${objects} objects, ${problems} problems`);
process.exitCode = problems === 0 ? 0 : 1;
