// llama.cpp through node-llama-cpp: the reference of the generation benchmarks. Fetched here, never a
// dependency.
import { execFileSync } from 'node:child_process';
import { existsSync, renameSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { cacheFolder } from '../cache.mjs';

export const NAME = 'node-llama-cpp';
export const VERSION = '3.22.1';

/** Installs node-llama-cpp and its CPU binary for linux-x64 (85 MB, no install script) once; gives its entry point. */
export function installLlamaCpp() {
  const folder = cacheFolder(`${NAME}-${VERSION}`);
  const entry = join(folder, 'node_modules', 'node-llama-cpp', 'dist', 'index.js');
  if (!existsSync(entry)) {
    const packages = [`${NAME}@${VERSION}`, `@${NAME}/linux-x64@${VERSION}`];
    const flags = ['--ignore-scripts', '--omit=optional', '--no-audit', '--no-fund', '--prefix', folder];
    execFileSync('npm', ['install', ...flags, ...packages], { stdio: 'inherit' });
  }
  return entry;
}

/** Reads `ids` into a sequence, or what is kept of them under `name`. */
async function loadOnce(sequence, ids, name) {
  const file = join(cacheFolder('states'), name);
  if (existsSync(file)) return sequence.loadStateFromFile(file, { acceptRisk: true });
  await sequence.evaluateWithoutGeneratingNewTokens(ids);
  await sequence.saveStateToFile(`${file}.partial`);
  renameSync(`${file}.partial`, file);
}

/**
 * Opens a GGUF file. `threads` is pinned: the library's default collapses when the cores are loaded. `cacheType` is of
 * keys and values: F16, Q8_0, Q4_0. With `keepsPrompt`, what a prompt and the one before begin with alike is not read again.
 * With `statesOf`, a name for the model, prompts that were read once are loaded from files: only the rest can be timed then.
 * Gives `{ weights, generate(promptIds, count), close() }`; generate yields greedy token ids, end-of-text included.
 */
export async function open({ model, threads, contextTokens, batchSize = 512, flashAttention = true, cacheType = 'F16', keepsPrompt = false, statesOf }) {
  const { getLlama, LlamaLogLevel } = await import(pathToFileURL(installLlamaCpp()).href);
  const llama = await getLlama({
    gpu: false,
    build: 'never',
    maxThreads: threads,
    logLevel: LlamaLogLevel.error,
  });
  const loaded = await llama.loadModel({ modelPath: model.gguf, useMmap: true });
  const context = await loaded.createContext({
    contextSize: contextTokens,
    batchSize,
    flashAttention,
    experimentalKvCacheKeyType: cacheType,
    experimentalKvCacheValueType: cacheType,
    threads: { ideal: threads, min: threads },
  });
  const kept = keepsPrompt ? context.getSequence() : undefined;
  return {
    weights: model.gguf,
    async *generate(promptIds, count) {
      const sequence = kept ?? context.getSequence();
      await kept?.adaptStateToTokens(promptIds, false);
      if (statesOf !== undefined) await loadOnce(sequence, promptIds.slice(0, -1), `${statesOf}-${cacheType}-${promptIds.length}`);
      let left = count;
      for await (const token of sequence.evaluate(promptIds.slice(sequence.nextTokenIndex), { temperature: 0, yieldEogToken: true })) {
        yield token;
        if (--left === 0) break;
      }
      if (!keepsPrompt) sequence.dispose();
    },
    close: () => llama.dispose(),
  };
}
