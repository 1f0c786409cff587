// Our runner against llama.cpp on the same weights: docs/benchmarks/foundation-cpu.json.
//
//   node tools/bench/foundation.mjs [--samples 5] [part …]  (agreement f16 bf16 1.1B-f16 1.1B-bf16 1.1B-prompt 1.1B-4k 4k 16k)
//   node tools/bench/foundation.mjs --peer FOLDER [part …]  (f16 bf16 1.1B-f16 1.1B-bf16 1.1B-prompt 1.1B-4k 4k)
//
// FOLDER holds the sources of llama.cpp or of a fork, such as ik_llama.cpp: it is built and is the reference then.
// Samples alternate between the engines, each in a fresh process pinned to as many cores as it has threads,
// so that a change of the machine's clock or load meets both. The reference runs with its best settings on
// this machine: flash attention (without it 10 to 40 % slower) and batches of 512 (64, 128, 256 and 2048 are
// no faster).
import { execFileSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { BENCHMARK_SIZES } from '../make-random-model.mjs';
import { benchmarkModel, ggufOf, MODELS } from './cache.mjs';
import { buildLlamaBench, timeLlamaBench } from './peers/llama-bench.mjs';
import { installLlamaCpp } from './peers/llama-cpp.mjs';
import { keepRows, processor, stamp, summarise } from './results.mjs';

const TITLE = 'Foundation: generation on the CPU against llama.cpp';
const ENGINES = ['kv', 'llama-cpp'];
const { values, positionals } = parseArgs({
  options: { samples: { type: 'string', default: '5' }, peer: { type: 'string' } },
  allowPositionals: true,
});
const built = values.peer === undefined ? undefined : buildLlamaBench(values.peer);
const REFERENCE = built?.name ?? 'llama.cpp (node-llama-cpp 3.22.1)';
const DECODED_TOKENS = 129;
const AGREEING_TOKENS = 32;
const SMALL_MODEL = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const MEASURE = fileURLToPath(new URL('./measure.mjs', import.meta.url));

function measureOnce(engine, model, threads, job) {
  if (built && engine !== 'kv') return timeLlamaBench(built, { gguf: model.gguf, threads, ...job });
  const argument = JSON.stringify({ engine, options: { model, threads }, ...job });
  const pinned = [
    '-c',
    Array.from({ length: threads }, (_, core) => core).join(','),
    process.execPath,
    MEASURE,
    argument,
  ];
  return JSON.parse(execFileSync('taskset', pinned, { encoding: 'utf8', maxBuffer: 2 ** 26 }));
}

/** `{ kv: […], 'llama-cpp': […] }`: measurements of both engines, taken in turn. */
function alternate(samples, model, threads, job) {
  const results = { kv: [], 'llama-cpp': [] };
  for (let sample = 0; sample < samples; sample++) {
    for (const engine of ENGINES) results[engine].push(measureOnce(engine, model, threads, job));
  }
  return results;
}

function requireTokens(name, engine, tokens, wanted) {
  const different = wanted.findIndex((token, index) => token !== tokens[index]);
  if (different === -1) return;
  throw new Error(
    `${name}: greedy token ${different} of ${engine} is ${tokens[different]}, wanted ${wanted[different]}; ` +
      'speeds of engines that disagree are not comparable',
  );
}

/**
 * Both engines must generate the same tokens: on the small model's recorded prompts those of transformers, which
 * end where the answer does, and on the timed model each other's.
 */
function agreement() {
  const small = { directory: SMALL_MODEL, gguf: ggufOf(SMALL_MODEL, 'needle-8m') };
  const { prompts } = JSON.parse(readFileSync(`${SMALL_MODEL}/golden.json`, 'utf8'));
  for (const { name, ids, greedy_new_ids: wanted } of prompts) {
    for (const engine of ENGINES) {
      const { tokens } = measureOnce(engine, small, 2, { promptIds: ids, newTokens: wanted.length });
      requireTokens(name, engine, tokens, wanted);
    }
    console.log(`needle-8m, ${name}: the ${wanted.length} greedy tokens of transformers`);
  }
  for (const dtype of ['f16', 'bf16']) {
    const job = { promptTokens: 512, newTokens: AGREEING_TOKENS };
    const [ours, theirs] = ENGINES.map((engine) => measureOnce(engine, benchmarkModel('125M', dtype), 2, job).tokens);
    requireTokens(`12 × 768, ${dtype}`, ENGINES[0], ours, theirs);
    console.log(`12 × 768, ${dtype}: the same ${ours.length} greedy tokens`);
  }
}

const shapes = ({ model = '125M', dtype, threads, promptTokens }) => {
  const sizes = { ...BENCHMARK_SIZES, ...MODELS[model] };
  const { layers, hidden, queryHeads, kvHeads, headDim, intermediate, vocabulary } = sizes;
  return {
    layers,
    hidden,
    queryHeads,
    kvHeads,
    headDim,
    intermediate,
    vocabulary,
    dtype,
    cache: 'f16',
    threads,
    promptTokens,
  };
};

function row(measure, setting, results, field, description) {
  const summary = (engine) => summarise(results[engine].map((result) => result[field]));
  return {
    measure: [measure, ...(built ? [`beside ${built.name}`] : []), processor()].join(', '),
    shapes: shapes(setting),
    device: 'cpu',
    kind: 'measured',
    ...description,
    result: summary('kv'),
    reference: { name: REFERENCE, ...summary('llama-cpp') },
    ...stamp(),
  };
}

const speed = (ratio) => ({ unit: 'tokens/s', better: 'higher', target: { ratio } });
const name = (what, { dtype, threads, promptTokens }) =>
  `${what}, ${promptTokens} tokens of prompt, ${dtype}, ${threads} thread${threads > 1 ? 's' : ''}`;

// AMX is used where the processor has it.
const hasTiles = readFileSync('/proc/cpuinfo', 'utf8').includes(' amx_bf16 ');
const THREADS = [...new Set([1, 2, availableParallelism()])].filter((threads) => threads <= availableParallelism());

/** Decode of the larger model: as many tokens as its speed allows. */
function largerModel(samples, dtype) {
  for (const threads of THREADS) {
    const setting = { model: '1.1B', dtype, threads, promptTokens: 64 };
    const job = { promptTokens: 64, newTokens: 33 };
    const results = alternate(samples, benchmarkModel('1.1B', dtype), threads, job);
    keepRows('foundation-cpu', TITLE, [
      row(name('decode, 1.1B', setting), setting, results, 'decodeTokensPerSecond', speed(1.1)),
    ]);
  }
}

/** Prefill of the larger model with all threads. */
function largerModelPrompt(samples, promptTokens, dtype, target) {
  const setting = { model: '1.1B', dtype, threads: availableParallelism(), promptTokens };
  const results = alternate(samples, benchmarkModel('1.1B', dtype), setting.threads, { promptTokens, newTokens: 1 });
  keepRows('foundation-cpu', TITLE, [
    row(name('prefill, 1.1B', setting), setting, results, 'prefillTokensPerSecond', speed(target)),
  ]);
}

/** Prefill and decode at 512 tokens. */
function shortPrompts(samples, dtype) {
  for (const threads of THREADS) {
    const setting = { dtype, threads, promptTokens: 512 };
    const results = alternate(samples, benchmarkModel('125M', dtype), threads, {
      promptTokens: 512,
      newTokens: DECODED_TOKENS,
    });
    keepRows('foundation-cpu', TITLE, [
      row(name('decode', setting), setting, results, 'decodeTokensPerSecond', speed(1.1)),
      row(name('prefill', setting), setting, results, 'prefillTokensPerSecond', speed(1)),
    ]);
  }
}

/** Prefill of a long prompt, with two threads. */
function longPrompt(samples, promptTokens, target) {
  const setting = { dtype: 'f16', threads: 2, promptTokens };
  const results = alternate(samples, benchmarkModel('125M', 'f16'), 2, { promptTokens, newTokens: 1 });
  keepRows('foundation-cpu', TITLE, [
    row(name('prefill', setting), setting, results, 'prefillTokensPerSecond', speed(target)),
  ]);
  return { setting, results };
}

/** Prefill of 16K tokens, the memory beyond the weights and the cache, and the event loop's delay meanwhile. */
function longestPrompt(samples) {
  const promptTokens = 16_384;
  const { setting, results } = longPrompt(samples, promptTokens, 1.3);
  const { layers, kvHeads, headDim } = BENCHMARK_SIZES;
  const cacheBytes = 2 * layers * kvHeads * headDim * 2 * promptTokens;
  for (const result of Object.values(results).flat()) {
    result.megabytesBeyondCache = (result.peakBytesBeyondWeights - cacheBytes) / 1e6;
  }
  const memory = { unit: 'MB', better: 'lower', chart: false, target: { atMost: 150 } };
  const delay = { unit: 'ms', better: 'lower', chart: false, target: { atMost: 20 } };
  const memoryName = name('peak memory beyond mapped weights and KV formula', setting);
  const delayName = name('event-loop delay p99 during prefill', setting);
  keepRows('foundation-cpu', TITLE, [
    row(memoryName, setting, results, 'megabytesBeyondCache', memory),
    row(delayName, setting, results, 'eventLoopDelayP99Milliseconds', delay),
  ]);
}

// What llama-bench times, too.
const TIMED = {
  f16: (samples) => shortPrompts(samples, 'f16'),
  bf16: (samples) => shortPrompts(samples, 'bf16'),
  '1.1B-f16': (samples) => largerModel(samples, 'f16'),
  '1.1B-bf16': (samples) => largerModel(samples, 'bf16'),
  '1.1B-prompt': (samples) => largerModelPrompt(samples, 512, 'f16', 1),
  '1.1B-4k': (samples) => largerModelPrompt(samples, 4096, 'bf16', hasTiles ? 3 : 1),
  '4k': (samples) => longPrompt(samples, 4096, 1),
};
const PARTS = built ? TIMED : { agreement, ...TIMED, '16k': longestPrompt };

const unknown = positionals.find((part) => !(part in PARTS));
if (unknown) throw new Error(`there is no part ${unknown}; the parts are ${Object.keys(PARTS).join(', ')}`);
if (!built) installLlamaCpp();
for (const part of positionals.length > 0 ? positionals : Object.keys(PARTS))
  PARTS[part](Number(values.samples));
