// A kernel that is bound by memory asks for what it reads next. A compiler may leave that out, since nothing depends on it: once
// decode over mixtures of dense and 2:4 blocks took half as long again, with the same results. So each function that asks must
// have an instruction that does. That is found in the objects of the native build: times of a busy machine cannot tell.
import { execFileSync } from 'node:child_process';
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const build = join(fileURLToPath(new URL('../native', import.meta.url)), 'build/CMakeFiles');
/** The functions that ask for memory, by the kernel that has them. */
const asking = {
  'coded-key-scores': ['compute'],
  'decode-attention': ['score_dims', 'score_pairs', 'add_value_columns'],
  'decode-attention-24': ['score_dims', 'score_pairs', 'score_sparse_dims', 'add_value_columns', 'add_sparse_columns'],
  'decode-attention-listed': ['score_dims', 'add_value_columns'],
  'decode-attention-quantized': ['score_tokens', 'add_groups'],
  linear: ['dot_rows'],
  'quantized-key-scores': ['score_dims'],
};

/** The functions of an object, each with how often it asks. */
function functionsOf(object) {
  const listing = execFileSync('objdump', ['--disassemble', '--demangle', '--no-show-raw-insn', object], { encoding: 'utf8', maxBuffer: 1 << 28 });
  return listing
    .split(/^(?=[0-9a-f]+ <)/m)
    .slice(1)
    .map((text) => ({ name: text.slice(0, text.indexOf('\n')), prefetches: text.split(/\tprefetch/).length - 1 }));
}

let functions = 0;
let problems = 0;
function complain(text) {
  console.error(`check-prefetches: ${text}`);
  problems += 1;
}

for (const [kernel, names] of Object.entries(asking)) {
  const all = ['avx2', 'avx512'].flatMap((isa) => {
    const folder = join(build, `kernels_${isa}.dir/kernels`, kernel);
    return readdirSync(folder)
      .filter((name) => name.endsWith('.cpu.cc.o'))
      .flatMap((name) => functionsOf(join(folder, name)));
  });
  for (const name of names) {
    // A compiler may put a function where it is called; of each there is one for some number of rows that it does not.
    const own = all.filter((each) => new RegExp(`\\b${name}<`).test(each.name) && !each.name.includes('[clone .cold]'));
    if (own.length === 0) complain(`${kernel} has no ${name} any more`);
    for (const { name: instance } of own.filter(({ prefetches }) => prefetches === 0)) complain(`${kernel}: no prefetch in ${instance}`);
    functions += own.length;
  }
}
console.log(`check-prefetches: ${functions} functions, ${problems} problems`);
process.exitCode = problems === 0 ? 0 : 1;
