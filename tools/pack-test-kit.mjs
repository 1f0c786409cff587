// Packs everything that the tests and benchmarks need into build/test-kit.tar.xz, for a machine that has a CUDA
// driver but no Node and no network. docs/gpu-test-kit.md says how to use it. Needs an addon built with KV_CUDA=on.
import { spawnSync } from 'node:child_process';
import {
  chmodSync,
  copyFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { basename, dirname, join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { installedBinary } from './build-native.mjs';

const root = resolve(fileURLToPath(new URL('..', import.meta.url)));
const kit = join(root, 'build/test-kit');
const archive = `${kit}.tar.xz`;
const largestArchive = 60_000_000;

function run(command, args) {
  const { status, error } = spawnSync(command, args, { stdio: ['ignore', 'ignore', 'inherit'] });
  if (error) throw error;
  if (status !== 0) throw new Error(`${command} ${args.join(' ')} failed; its output above says why.`);
}

const manifestOf = (folder) => JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));

function packNode() {
  const node = join(kit, 'node');
  copyFileSync(process.execPath, node);
  run('strip', [node]);
  run(node, ['--version']);
}

/** Fails when a test imports what the kit's stand-in for vitest does not have. */
function expectProvided(packageName, file, text, provided) {
  for (const [, names] of text.matchAll(/^import \{([^}]*)\} from 'vitest';/gm)) {
    const missing = names.split(',').map((each) => each.trim()).filter((each) => each !== '' && !each.startsWith('type ') && !provided.has(each));
    if (missing.length > 0) throw new Error(`${packageName}/src/${file} imports ${missing.join(', ')}, which tools/test-kit/vitest.mjs does not have.`);
  }
}

/** Compiles sources and tests file by file, so that each finds its data where its source does. */
async function packPackage(folder, provided) {
  const name = basename(folder);
  const target = join(kit, 'packages', name);
  mkdirSync(target, { recursive: true });
  writeFileSync(join(target, 'package.json'), JSON.stringify(compiledManifest(folder)));
  if (existsSync(join(folder, 'test-data'))) cpSync(join(folder, 'test-data'), join(target, 'test-data'), { recursive: true });
  const files = readdirSync(join(folder, 'src'), { recursive: true });
  for (const file of files.filter((file) => file.endsWith('.json'))) cpSync(join(folder, 'src', file), join(target, 'dist', file));
  const sources = files.filter((file) => file.endsWith('.ts'));
  for (const file of sources) expectProvided(name, file, readFileSync(join(folder, 'src', file), 'utf8'), provided);
  await build({
    entryPoints: sources.map((file) => join(folder, 'src', file)),
    outbase: join(folder, 'src'),
    outdir: join(target, 'dist'),
    format: 'esm',
    // Imports of JSON keep their attribute, which the first versions of Node 20 do not know.
    target: 'node20.10',
    logLevel: 'warning',
  });
  link(`@kv/${name}`, target);
}

/** The manifest of a package whose sources are compiled file by file; it exports what the workspace sees. */
function compiledManifest(folder) {
  const manifest = manifestOf(folder);
  const compiled = (source) => source.replace('./src/', './dist/').replace(/\.ts$/, '.js');
  const exports = Object.entries(manifest.exports).map(([entry, target]) => [
    entry,
    compiled(typeof target === 'string' ? target : target['@kv/source']),
  ]);
  // What tests share is exported nowhere else.
  if (existsSync(join(folder, 'src/testing/index.ts'))) exports.push(['./testing', './dist/testing/index.js']);
  return { ...manifest, exports: Object.fromEntries(exports) };
}

function link(name, target) {
  const path = join(kit, 'node_modules', name);
  mkdirSync(dirname(path), { recursive: true });
  symlinkSync(join(name.includes('/') ? '../..' : '..', target.slice(kit.length + 1)), path);
}

/** Where Node finds a dependency of `folder`: in the nearest node_modules above it that has it. */
function installedFolder(name, folder) {
  const installed = join(folder, 'node_modules', name);
  if (existsSync(installed)) return installed;
  if (folder === root) throw new Error(`${name} is not installed. Run "npm ci --ignore-scripts" first.`);
  return installedFolder(name, dirname(folder));
}

/** Copies a dependency of `folder` and what it depends on, without types and source maps. */
function packDependency(name, folder) {
  const source = installedFolder(name, folder);
  const target = join(kit, relative(root, source));
  if (existsSync(target)) return;
  cpSync(source, target, { recursive: true, filter: (file) => !/\.(map|md|[cm]?ts)$|\/node_modules$/.test(file) });
  for (const dependency of Object.keys(manifestOf(source).dependencies ?? {})) packDependency(dependency, source);
}

function packAddon() {
  const binary = installedBinary(true);
  if (!existsSync(binary)) throw new Error('There is no CUDA binary. Run "KV_CUDA=on node tools/build-native.mjs" first.');
  const target = join(kit, 'node_modules/@kv', basename(dirname(binary)));
  mkdirSync(target, { recursive: true });
  for (const file of ['kv.node', 'package.json']) copyFileSync(join(dirname(binary), file), join(target, file));
}

function packNativeTests() {
  for (const name of ['cuda_tests', 'cuda_kernel_tests', 'libcuda-kernels.so']) {
    const target = join(kit, name.replaceAll('_', '-'));
    copyFileSync(join(root, 'native/build', name), target);
    run('strip', [target]);
  }
}

async function packRunner() {
  const source = join(root, 'tools/test-kit');
  await build({
    entryPoints: [join(source, 'vitest.mjs')],
    outfile: join(kit, 'node_modules/vitest/index.js'),
    bundle: true,
    format: 'esm',
    platform: 'node',
    target: 'node20',
    logLevel: 'warning',
  });
  await build({ entryPoints: [join(root, 'vitest.setup.ts')], outfile: join(kit, 'vitest.setup.mjs'), target: 'node20' });
  writeFileSync(join(kit, 'node_modules/vitest/package.json'), JSON.stringify({ type: 'module', exports: './index.js' }));
  for (const file of ['run-file.mjs', 'run-tests.mjs']) copyFileSync(join(source, file), join(kit, file));
  const start = join(kit, 'run-tests');
  writeFileSync(start, '#!/bin/sh\nhere=$(dirname "$0")\nexec "$here/node" "$here/run-tests.mjs" "$@"\n');
  chmodSync(start, 0o755);
}

try {
  rmSync(kit, { recursive: true, force: true });
  mkdirSync(kit, { recursive: true });
  packNode();
  packAddon();
  packNativeTests();
  await packRunner();
  const provided = new Set(Object.keys(await import(join(kit, 'node_modules/vitest/index.js'))));
  const packages = readdirSync(join(root, 'packages'))
    .map((name) => join(root, 'packages', name))
    .filter((folder) => existsSync(join(folder, 'src')));
  for (const folder of packages) {
    await packPackage(folder, provided);
    const { dependencies = {} } = manifestOf(folder);
    for (const name of Object.keys(dependencies)) if (!name.startsWith('@kv/')) packDependency(name, folder);
  }
  packDependency('fast-check', root);
  for (const folder of ['models', 'tools/bench', 'tools/gpu']) cpSync(join(root, folder), join(kit, folder), { recursive: true });
  const rows = 'docs/benchmarks';
  for (const file of readdirSync(join(root, rows)).filter((file) => file.endsWith('.json'))) cpSync(join(root, rows, file), join(kit, rows, file));
  const page = 'docs/methods/serve-simulator.md';
  cpSync(join(root, page), join(kit, page));
  for (const file of ['main-job.mjs', 'make-random-model.mjs']) copyFileSync(join(root, 'tools', file), join(kit, 'tools', file));
  // Sorted, so that the two files with the same kernels lie near each other.
  // The dictionary is larger than the two files of CUDA's checks, which hold the same kernels one after the other.
  const compress = 'xz -T0 --lzma2=preset=6,dict=32MiB';
  const how = ['--create', '--file', archive, '--sort=name', '--use-compress-program', compress];
  run('tar', [...how, '--directory', dirname(kit), basename(kit)]);
  const { size } = statSync(archive);
  console.log(`${archive}: ${(size / 1e6).toFixed(1)} MB`);
  if (size >= largestArchive) throw new Error(`The archive has ${size} bytes; fewer than ${largestArchive} are wanted.`);
} catch (error) {
  console.error(`pack-test-kit: ${error.message}`);
  process.exitCode = 1;
}
