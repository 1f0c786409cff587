// Decode of the small model over caches in codes beside llama.cpp with its own on the same weights, in turn:
// docs/benchmarks/hcattn-cpu.json. Needs built packages. llama.cpp takes minutes to read the prompt with a cache of codes, so
// what it has read is kept in a file.
//
//   node tools/bench/hcattn-llama.mjs [--prompt 16192] [--samples 3] [--threads 2] [--print]
import { execFileSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { ggufOf } from './cache.mjs';
import { installLlamaCpp } from './peers/llama-cpp.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const { values: options } = parseArgs({
  options: {
    prompt: { type: 'string', default: '16192' },
    samples: { type: 'string', default: '3' },
    threads: { type: 'string', default: '2' },
    print: { type: 'boolean', default: false },
  },
});
const [promptTokens, samples, threads] = [options.prompt, options.samples, options.threads].map(Number);
const DECODED_TOKENS = 129;
const directory = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = { directory, gguf: ggufOf(directory, 'needle-8m') };
const pairs = [
  { codec: 'int8', cacheType: 'Q8_0' },
  { codec: 'int4', cacheType: 'Q4_0' },
];

/** Tokens a second of one engine in a process of its own, pinned to as many cores as it has threads. */
function decode(engine, cache) {
  const job = { engine, options: { model, threads, ...cache }, promptTokens, newTokens: DECODED_TOKENS };
  const cores = Array.from({ length: threads }, (_, core) => core).join(',');
  const measure = fileURLToPath(new URL('./measure.mjs', import.meta.url));
  const output = execFileSync('taskset', ['-c', cores, process.execPath, measure, JSON.stringify(job)], { encoding: 'utf8', maxBuffer: 2 ** 26 });
  return JSON.parse(output).decodeTokensPerSecond;
}

installLlamaCpp();
for (const { codec, cacheType } of pairs) {
  const speeds = { ours: [], dense: [], theirs: [] };
  for (let sample = 0; sample < samples; sample++) {
    speeds.ours.push(decode('kv', { codec }));
    speeds.dense.push(decode('kv', {}));
    speeds.theirs.push(decode('llama-cpp', { cacheType, statesOf: 'needle-8m' }));
  }
  const [ours, dense, theirs] = [speeds.ours, speeds.dense, speeds.theirs].map(summarise);
  const common = { device: 'cpu', kind: 'measured', unit: 'tokens/s', better: 'higher', result: ours, threads, ...stamp() };
  const shapes = 'needle-8m: 8 layers, 8/2 heads of 64';
  const measure = `a later token, ${codec}, ${promptTokens} tokens of prompt, ${threads} threads`;
  const rows = [
    { measure, shapes, ...common, reference: { name: `llama.cpp (node-llama-cpp 3.22.1), ${cacheType} cache`, ...theirs }, target: { ratio: 1.2 } },
    { measure: `${measure}, beside dense`, shapes, ...common, reference: { name: 'ours, dense cache', ...dense } },
  ];
  if (!options.print) keepRows('hcattn-cpu', 'Attention over keys and values in codes, on the CPU', rows);
  for (const { measure: name, result, reference } of rows) {
    console.log(`${name}: ${result.median.toFixed(1)} tokens/s, ${reference.name} ${reference.median.toFixed(1)}, ${(result.median / reference.median).toFixed(2)}x`);
  }
}
