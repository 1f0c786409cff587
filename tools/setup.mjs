// Everything between a fresh clone and running code: installs the dependencies, builds the native addon,
// builds the packages. A step whose inputs have not changed since it last succeeded is skipped.
import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join, relative, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { buildNative, cudaChoice, installedBinary } from './build-native.mjs';

const root = fileURLToPath(new URL('..', import.meta.url));
const stamps = join(root, 'build/stamps');
const oldestNode = [20, 19];
const generated = new Set(['node_modules', 'dist', 'out-tsc', 'build', 'coverage']);

function filesUnder(path) {
  if (!existsSync(path)) return [];
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path, { withFileTypes: true })
    .filter((entry) => !generated.has(entry.name))
    .flatMap((entry) => (entry.isDirectory() ? filesUnder(join(path, entry.name)) : [join(path, entry.name)]));
}

/** A digest of the files that `keep` accepts under `paths`, and of `facts`. */
function digest(paths, keep, facts = []) {
  const hash = createHash('sha256').update(JSON.stringify(facts));
  for (const file of paths.flatMap((path) => filesUnder(join(root, path))).filter(keep).sort()) {
    hash.update(`\0${relative(root, file)}\0`).update(readFileSync(file));
  }
  return hash.digest('hex');
}

async function run(command, args) {
  const status = await new Promise((resolve, reject) => {
    const child = spawn(command, args, { cwd: root, stdio: 'inherit' });
    child.on('close', resolve).on('error', ({ message }) => reject(new Error(`${command} could not be started: ${message}`)));
  });
  if (status !== 0) throw new Error(`${command} ${args.join(' ')} failed; its output above says why.`);
}

async function step({ name, state, outputs, work }) {
  const stamp = join(stamps, name);
  const wanted = state();
  const upToDate = existsSync(stamp) && readFileSync(stamp, 'utf8') === wanted;
  if (upToDate && outputs().every((output) => existsSync(resolve(root, output)))) return;
  console.log(`setup: ${name} …`);
  const started = performance.now();
  rmSync(stamp, { force: true });
  await work();
  mkdirSync(stamps, { recursive: true });
  writeFileSync(stamp, wanted);
  console.log(`setup: ${name} done in ${((performance.now() - started) / 1000).toFixed(1)} s`);
}

function packagesToBuild() {
  return readdirSync(join(root, 'packages')).filter((name) =>
    existsSync(join(root, 'packages', name, 'tsup.config.ts')),
  );
}

function checkNode() {
  const [major, minor] = process.versions.node.split('.').map(Number);
  if (major < oldestNode[0] || (major === oldestNode[0] && minor < oldestNode[1])) {
    throw new Error(`Node ${process.versions.node} is too old for @kv; install Node ${oldestNode.join('.')} or newer.`);
  }
}

function checkPlatform() {
  if (process.platform === 'linux') return;
  throw new Error(`@kv is built on Linux only, and this is ${process.platform}; use a Linux machine, container or WSL.`);
}

function checkCompilers() {
  const answers = (command) => command !== undefined && spawnSync(command, ['--version'], { stdio: 'ignore' }).status === 0;
  const install = 'install CMake 3.20 or newer and a C++17 compiler (Debian: apt install cmake g++).';
  if (!answers('cmake')) throw new Error(`CMake was not found; ${install}`);
  // CXX may hold options too, which CMake takes apart.
  if (process.env.CXX === undefined && !['c++', 'g++', 'clang++'].some(answers)) throw new Error(`No C++ compiler was found; ${install}`);
}

function steps() {
  const { cuda, why } = cudaChoice();
  const { version } = JSON.parse(readFileSync(join(root, 'packages/sparse-core/package.json'), 'utf8'));
  return [
    {
      name: 'dependencies',
      state: () => digest(['package-lock.json'], () => true, [process.platform, process.arch]),
      outputs: () => ['node_modules/.package-lock.json', 'node_modules/nx/package.json'],
      // No dependency needs its install script.
      work: () => run('npm', ['ci', '--ignore-scripts', '--no-audit', '--no-fund']),
    },
    {
      name: 'native addon',
      state: () => digest(['native', 'tools/build-native.mjs'], (file) => !file.includes('/native/tests/'), [cuda, version]),
      outputs: () => [installedBinary(cuda)],
      work: async () => {
        checkCompilers();
        console.log(`setup: compiling for the CPU ${cuda ? 'and CUDA' : 'only'} (${why}), which takes minutes`);
        await buildNative({ quiet: true });
      },
    },
    {
      name: 'packages',
      state: () =>
        digest(
          ['packages', 'package-lock.json', 'tsconfig.base.json', 'tsup.shared.ts', 'nx.json'],
          (file) => !/\.test\.ts$|\.md$|\.node$/.test(file),
        ),
      outputs: () => ['node_modules/.bin/kv', ...packagesToBuild().map((name) => `packages/${name}/dist/index.js`)],
      work: async () => {
        // One run of the compiler checks all packages; those of the builds then find nothing to do.
        await run('npm', ['run', '--silent', 'typecheck']);
        await run(process.execPath, ['node_modules/nx/dist/bin/nx.js', 'run-many', '-t', 'build']);
        // npm links only commands whose file is there, and it was not when the dependencies came.
        await run('npm', ['rebuild', '--ignore-scripts', '@kv/cli']);
      },
    },
  ];
}

try {
  process.env.NX_DAEMON = 'false';
  process.env.NX_NO_CLOUD = 'true';
  checkNode();
  checkPlatform();
  const [dependencies, ...built] = steps();
  await step(dependencies);
  // Packages are mostly built on one core; the compiler of the addon takes the others.
  const ends = await Promise.allSettled(built.map(step));
  for (const { reason } of ends) if (reason) throw reason;
} catch (error) {
  console.error(`setup: ${error.message}`);
  process.exitCode = 1;
}
