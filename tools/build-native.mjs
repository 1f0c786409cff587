// Builds the native addon into native/build and installs it in the platform package that publishes it.
// `--out DIR` only builds, and elsewhere. `--fast-compile` takes a fourth of the time for CUDA; its kernels are slow then,
// and most of them are for Ampere alone.
//
// CUDA is compiled when nvcc and a GPU are there, always with KV_CUDA=on, never with KV_CUDA=off.
import { spawn, spawnSync } from 'node:child_process';
import { copyFileSync, existsSync, mkdirSync, readFileSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { availableParallelism } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const root = fileURLToPath(new URL('..', import.meta.url));

function answers(command, args) {
  return spawnSync(command, args, { stdio: 'ignore' }).status === 0;
}

/** Whether this build includes CUDA, and why or why not. */
export function cudaChoice() {
  const asked = process.env.KV_CUDA;
  if (asked === 'off') return { cuda: false, why: 'KV_CUDA=off' };
  const compiler = answers('nvcc', ['--version']);
  if (asked === 'on') {
    if (!compiler) throw new Error('KV_CUDA=on asks for CUDA, but nvcc is not on the PATH. Add it, or unset KV_CUDA.');
    return { cuda: true, why: 'KV_CUDA=on' };
  }
  if (asked !== undefined) throw new Error(`KV_CUDA is '${asked}'. It may be 'on', 'off' or unset.`);
  if (!compiler) return { cuda: false, why: 'no nvcc on the PATH' };
  if (!answers('nvidia-smi', ['-L'])) return { cuda: false, why: 'no NVIDIA GPU found' };
  return { cuda: true, why: 'nvcc and a GPU were found' };
}

/** Where @kv/sparse-core looks for the binary: in the platform package, which the workspace links. */
export function installedBinary(cuda) {
  const name = `sparse-core-${process.platform}-${process.arch}${cuda ? '-cuda' : ''}`;
  return join(root, 'node_modules/@kv', name, 'kv.node');
}

/** Why a binary that was built here is too large to publish; undefined where none was built, or it is not. */
export function sizeProblem(cuda) {
  const binary = installedBinary(cuda);
  // Every user downloads that of the CPU; the other only who asks for CUDA.
  const most = cuda ? 60_000_000 : 5_000_000;
  const size = statSync(binary, { throwIfNoEntry: false })?.size ?? 0;
  return size < most ? undefined : `${binary} has ${size} bytes; fewer than ${most} are wanted of one that is published.`;
}

function install(binary, target) {
  const folder = dirname(target);
  if (!existsSync(folder)) {
    // A platform that nothing is published for, such as Linux on Arm: its package exists only here.
    mkdirSync(folder, { recursive: true });
    writeFileSync(join(folder, 'package.json'), JSON.stringify({ main: 'kv.node' }));
  }
  // Renamed into place: overwriting a file that a running process has mapped would crash it.
  copyFileSync(binary, `${target}.new`);
  renameSync(`${target}.new`, target);
}

/** Runs a command; of a quiet one, what it wrote is given. */
function run(command, args, quiet) {
  const child = spawn(command, args, { cwd: root, stdio: quiet ? 'pipe' : 'inherit' });
  let written = '';
  for (const stream of [child.stdout, child.stderr]) stream?.setEncoding('utf8').on('data', (text) => (written += text));
  return new Promise((resolve, reject) => {
    child.on('error', reject).on('close', (status) => resolve({ status, written }));
  });
}

export async function buildNative({ out, quiet = false, fastCompile = false } = {}) {
  const { cuda } = cudaChoice();
  const directory = resolve(root, out ?? 'native/build');
  const manifest = createRequire(import.meta.url).resolve('cmake-js/package.json');
  const { bin } = JSON.parse(readFileSync(manifest, 'utf8'));
  const cmakeJs = join(dirname(manifest), bin['cmake-js']);
  const options = [
    `--directory=${join(root, 'native')}`,
    `--out=${directory}`,
    `--parallel=${availableParallelism()}`,
    `--CDKV_CUDA=${cuda ? 'ON' : 'OFF'}`,
    `--CDKV_FAST_COMPILE=${fastCompile ? 'ON' : 'OFF'}`,
  ];
  // `build` alone would keep the options of an earlier configuration.
  for (const command of ['configure', 'build']) {
    const { status, written } = await run(process.execPath, [cmakeJs, command, ...options], quiet);
    if (status === 0) continue;
    process.stderr.write(written);
    throw new Error('The native build failed; the output above says where.');
  }
  const binary = join(directory, 'Release/kv.node');
  if (out !== undefined) return;
  install(binary, installedBinary(cuda));
  // It works all the same, and another compiler may not be ours to blame.
  const problem = sizeProblem(cuda);
  if (problem !== undefined) console.warn(problem);
  // sparse-core prefers a CUDA binary; one of an earlier build would hide this.
  if (!cuda) rmSync(installedBinary(true), { force: true });
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const { values } = parseArgs({ options: { out: { type: 'string' }, 'fast-compile': { type: 'boolean' } } });
  await buildNative({ out: values.out, fastCompile: values['fast-compile'] });
}
