// What the benchmarks fetch or make is kept outside the tree: KV_BENCH_CACHE, or ~/.cache/kv-bench.
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, renameSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { BENCHMARK_SIZES, makeRandomModel } from '../make-random-model.mjs';
import { exportGguf } from './gguf-export.mjs';

/** A folder of the cache, made when missing. */
export function cacheFolder(name) {
  const folder = join(process.env.KV_BENCH_CACHE ?? join(homedir(), '.cache', 'kv-bench'), name);
  mkdirSync(folder, { recursive: true });
  return folder;
}

/** Makes `path` with `make(temporaryPath)` unless it is there; an interrupted run leaves no half-made result. */
function once(path, make) {
  if (!existsSync(path)) {
    make(`${path}.partial`);
    renameSync(`${path}.partial`, path);
  }
  return path;
}

/** The timed models by name: what differs from the sizes of make-random-model.mjs. */
export const MODELS = {
  '125M': {},
  '1.1B': { layers: 16, hidden: 2048, queryHeads: 32, kvHeads: 8, intermediate: 8192 },
};

/**
 * Drops a file from the page cache. A file that was just written lies there in small pages. On a virtual machine it can take three
 * times as long to pass over them as over those of a file that was read from the disk.
 */
function dropFromPageCache(file) {
  execFileSync('sync', [file]);
  execFileSync('dd', [`if=${file}`, 'iflag=nocache', 'count=0', 'status=none']);
}

/** `{ directory, gguf }` of one of MODELS with weights of `dtype` f16 or bf16. */
export function benchmarkModel(model, dtype) {
  const sizes = { ...BENCHMARK_SIZES, ...MODELS[model], dtype };
  const name = `llama-${sizes.layers}x${sizes.hidden}-${dtype}`;
  const directory = once(join(cacheFolder('models'), name), (path) => makeRandomModel(path, sizes));
  const gguf = ggufOf(directory, name);
  for (const file of [join(directory, 'model.safetensors'), gguf]) dropFromPageCache(file);
  return { directory, gguf };
}

/** The GGUF file of a Hugging Face directory, exported once under `name`. */
export function ggufOf(directory, name) {
  return once(join(cacheFolder('models'), `${name}.gguf`), (path) => exportGguf(directory, path));
}
