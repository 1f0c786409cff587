// What the benchmarks fetch or make is kept outside the tree: KV_BENCH_CACHE, or ~/.cache/kv-bench.
import { existsSync, mkdirSync, renameSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import { makeRandomModel } from '../make-random-model.mjs';
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

/** `{ directory, gguf }` of the 12 × 768 benchmark model (see make-random-model.mjs) in `dtype` f16 or bf16. */
export function benchmarkModel(dtype) {
  const folder = cacheFolder('models');
  const directory = once(join(folder, `llama-12x768-${dtype}`), (path) => makeRandomModel(path, { dtype }));
  return { directory, gguf: ggufOf(directory, `llama-12x768-${dtype}`) };
}

/** The GGUF file of a Hugging Face directory, exported once under `name`. */
export function ggufOf(directory, name) {
  return once(join(cacheFolder('models'), `${name}.gguf`), (path) => exportGguf(directory, path));
}
