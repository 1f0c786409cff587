// A processor without AVX-512 must never meet a function compiled with it. Of the inline functions that several
// sources define the linker keeps any one copy, so an object built for a wider set may define none outside the
// namespace of that set. Reads the objects of the native build.
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const build = fileURLToPath(new URL('../native/build/CMakeFiles', import.meta.url));
let objects = 0;
let problems = 0;
for (const isa of ['avx2', 'avx512']) {
  const folder = join(build, `kernels_${isa}.dir`);
  if (!existsSync(folder)) continue;
  for (const file of readdirSync(folder, { recursive: true }).filter((name) => name.endsWith('.o'))) {
    objects += 1;
    const symbols = execFileSync('nm', ['--demangle', '--defined-only', join(folder, file)], { encoding: 'utf8' });
    for (const line of symbols.split('\n')) {
      // Weak and unique symbols are those that the linker merges.
      const merged = /^\S+ [WVu] (.*)/.exec(line)?.[1];
      if (merged === undefined || merged.includes(`kv::${isa}::`)) continue;
      console.error(`check-instruction-sets: ${file} (${isa}) defines ${merged} for everyone`);
      problems += 1;
    }
  }
}
console.log(`check-instruction-sets: ${objects} objects, ${problems} problems`);
process.exitCode = problems === 0 ? 0 : 1;
