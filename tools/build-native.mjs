// Builds the native addon into native/build/Release/kv.node and copies it into the platform package that
// publishes it. `--out DIR` builds elsewhere and copies nothing.
//
// CUDA is compiled when nvcc and a GPU are there, always with KV_CUDA=on, never with KV_CUDA=off.
import { spawnSync } from 'node:child_process';
import { copyFileSync, existsSync, readFileSync, renameSync } from 'node:fs';
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

function platformPackage(cuda) {
  const { header } = process.report.getReport();
  if (process.platform !== 'linux' || process.arch !== 'x64' || !header.glibcVersionRuntime) return undefined;
  const folder = join(root, 'packages', cuda ? 'sparse-core-linux-x64-cuda' : 'sparse-core-linux-x64');
  return existsSync(folder) ? folder : undefined;
}

export function buildNative({ out, quiet = false } = {}) {
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
  ];
  // `build` alone would keep the options of an earlier configuration.
  for (const command of ['configure', 'build']) {
    const { status, stdout, stderr } = spawnSync(process.execPath, [cmakeJs, command, ...options], {
      cwd: root,
      stdio: quiet ? 'pipe' : 'inherit',
      encoding: 'utf8',
      maxBuffer: 1 << 28,
    });
    if (status === 0) continue;
    if (quiet) process.stderr.write(stdout + stderr);
    throw new Error('The native build failed; the output above says where.');
  }
  const binary = join(directory, 'Release/kv.node');
  const target = out === undefined ? platformPackage(cuda) : undefined;
  if (target === undefined) return;
  // Renamed into place: overwriting a file that a running process has mapped would crash it.
  copyFileSync(binary, join(target, 'kv.node.new'));
  renameSync(join(target, 'kv.node.new'), join(target, 'kv.node'));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const { values } = parseArgs({ options: { out: { type: 'string' } } });
  buildNative(values);
}
