// One operation has one name everywhere: fails when a file of an operation is missing or misnamed, or no page lists it.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = fileURLToPath(new URL('..', import.meta.url));
const problems = [];

function names(folder) {
  const path = join(root, folder);
  return existsSync(path) ? readdirSync(path, { withFileTypes: true }) : [];
}

function demand(operation, file) {
  if (!existsSync(join(root, file))) problems.push(`${operation} lacks ${file}`);
}

const index = readFileSync(join(root, 'docs/ops/README.md'), 'utf8');
const packages = names('packages').map((entry) => entry.name);
const operations = names('native/kernels')
  .filter((entry) => entry.isDirectory())
  .map((entry) => entry.name);

for (const operation of operations) {
  const kernels = `native/kernels/${operation}`;
  for (const part of ['h', 'cpu.cc', 'dispatch.cc']) demand(operation, `${kernels}/${operation}.${part}`);
  for (const { name } of names(kernels)) {
    if (!name.startsWith(`${operation}.`) && !name.startsWith(`${operation}-`)) {
      problems.push(`${kernels}/${name} does not begin with its operation's name`);
    }
    if (name.endsWith('.cu') && !/\.(sm80|sm90a|cuda)\.cu$/.test(name)) {
      problems.push(`${kernels}/${name} does not say what it is compiled for (.sm80.cu, .sm90a.cu or .cuda.cu)`);
    }
  }
  demand(operation, `native/bindings/${operation}.binding.cc`);
  demand(operation, `docs/ops/${operation}.md`);
  if (!index.includes(`](${operation}.md)`)) problems.push(`docs/ops/README.md does not list ${operation}`);

  const wrappers = packages.filter((each) => existsSync(join(root, `packages/${each}/src/operations/${operation}.ts`)));
  if (wrappers.length !== 1) {
    problems.push(`${operation} has ${wrappers.length} wrappers packages/*/src/operations/${operation}.ts; one is wanted`);
  }
  for (const each of wrappers) demand(operation, `packages/${each}/src/operations/${operation}.test.ts`);
}

const guide = readFileSync(join(root, 'CONTRIBUTING.md'), 'utf8');
for (const { name } of names('native/shared').filter((entry) => entry.isDirectory())) {
  if (!guide.includes(`| \`shared/${name}\` |`)) problems.push(`CONTRIBUTING.md does not say what native/shared/${name} holds`);
}

for (const folder of ['docs/ops', 'docs/ops/notes']) {
  for (const page of names(folder).filter((entry) => entry.isFile())) {
    const operation = page.name.replace(/\.md$/, '');
    if (operation !== 'README' && !operations.includes(operation)) problems.push(`${folder}/${page.name} names no operation of native/kernels`);
  }
}

for (const problem of problems) console.error(`check-operations: ${problem}`);
console.log(`check-operations: ${operations.length} operations, ${problems.length} problems`);
process.exitCode = problems.length === 0 ? 0 : 1;
