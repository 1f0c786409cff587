// AMX beside AVX-512: linear layers of many rows, prompt attention and whole prompts. Prints the rows of
// docs/benchmarks/amx-cpu.json, one a line, for keep.mjs. Needs a processor with AMX, and the programs, which link with the
// native build:
//
//   for NAME in linear-amx attention-amx; do
//     g++ -std=c++17 -O2 -DKV_AMX -Inative tools/bench/amx/$NAME.cc native/build/libkv_core.a -pthread -static -o $NAME
//   done
//   node tools/bench/amx/run.mjs ./linear-amx [--threads 16] [--samples 9] > rows.jsonl
//   node tools/bench/amx/run.mjs ./attention-amx [--threads 16] [--samples 9] > rows.jsonl
//   node tools/bench/amx/run.mjs --dtype bf16 --models DIR [--cache bf16] [--threads 16] [--samples 3] > rows.jsonl
//                                                                                                 (prompts of the 1.1B)
import { execFileSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { generateTokens, kvPolicy, Model } from '../../../packages/model/dist/index.js';
import { createDevice, densePagedStore } from '../../../packages/sparse-core/dist/index.js';
import { BENCHMARK_SIZES, makeRandomModel } from '../../make-random-model.mjs';
import { MODELS } from '../cache.mjs';
import { promptOf } from '../measure.mjs';
import { processor, stamp, summarise } from '../results.mjs';

const ROWS = 512;
const PROMPT_TOKENS = 4096;

function rowOf(measure, shapes, unit, reference, target, [amx, avx512], better = 'higher') {
  return {
    measure: `${measure}, ${shapes.threads === 1 ? '1 thread' : `${shapes.threads} threads`}, ${processor()}`,
    shapes,
    device: 'cpu',
    kind: 'measured',
    unit,
    better,
    chart: false,
    result: summarise(amx),
    reference: { name: reference, ...summarise(avx512) },
    target: { ratio: target },
    instructionSet: 'amx',
    ...stamp(),
  };
}

function layerRow({ tokens, inputs, outputs, dtype, threads, amx, avx512 }) {
  const gigaflop = (2 * tokens * inputs * outputs) / 1e9;
  const rates = [amx, avx512].map((times) => times.map((milliseconds) => gigaflop / (milliseconds / 1e3)));
  const measure = `linear on AMX, ${tokens} × ${inputs} → ${outputs}, ${dtype} weights`;
  return rowOf(measure, { tokens, inputs, outputs, dtype, threads }, 'GFLOP/s', 'the same layer on AVX-512', 2.5, rates);
}

function attentionRow({ blocks, amx, avx512, ...shapes }) {
  const { rows, keys, queryHeads, kvHeads, headDim, dtype } = shapes;
  const heads = `${queryHeads}/${kvHeads} heads of ${headDim}`;
  const over = { dense: '', '2:4': ', all blocks 2:4', listed: ', over a quarter of the blocks' }[blocks];
  const measure = `prefill attention on AMX, ${rows} rows, ${keys} keys, ${heads}, ${dtype} cache${over}`;
  return rowOf(measure, { blocks, ...shapes }, 'ms', 'the same on AVX-512', 1, [amx, avx512], 'lower');
}

async function timePrompt(runner, prompt) {
  const begin = performance.now();
  for await (const token of generateTokens(runner, prompt, { maxTokens: 1, endIds: [] })) void token;
  return prompt.length / ((performance.now() - begin) / 1e3);
}

/** Prompts on both sets in turn; the weights are one mapped file. */
async function promptRow(directory, dtype, cache, threads, samples) {
  const runners = [];
  for (const instructionSet of ['amx', 'avx512']) {
    const model = await Model.open(directory, { device: createDevice({ threads, instructionSet }) });
    const policy = cache === undefined ? undefined : kvPolicy({ store: densePagedStore({ dtype: cache }) });
    runners.push(model.createRunner({ policy, contextTokens: PROMPT_TOKENS + 64 }));
  }
  for (const runner of runners) await timePrompt(runner, promptOf(ROWS)); // touches the weights
  const rates = [[], []];
  for (let sample = 0; sample < samples; sample++) {
    for (const [which, runner] of runners.entries()) rates[which].push(await timePrompt(runner, promptOf(PROMPT_TOKENS)));
  }
  const measure = `prefill on AMX, 1.1B, ${PROMPT_TOKENS} tokens of prompt, ${dtype}${cache === undefined ? '' : `, cache in ${cache}`}`;
  const shapes = { model: '1.1B', promptTokens: PROMPT_TOKENS, dtype, cache, threads };
  return rowOf(measure, shapes, 'tokens/s', 'the same prompt on AVX-512', 2, rates);
}

const { values, positionals } = parseArgs({
  options: {
    threads: { type: 'string', default: '16' },
    samples: { type: 'string', default: '9' },
    dtype: { type: 'string', default: 'bf16' },
    cache: { type: 'string' },
    models: { type: 'string' },
  },
  allowPositionals: true,
});
const print = (row) => console.log(JSON.stringify(row));
for (const threads of values.threads.split(',')) {
  if (values.models === undefined) {
    const printed = execFileSync(positionals[0], [threads, String(ROWS), values.samples], { encoding: 'utf8' });
    for (const line of printed.trim().split('\n')) {
      const measured = JSON.parse(line);
      print('blocks' in measured ? attentionRow(measured) : layerRow(measured));
    }
    continue;
  }
  const directory = join(values.models, `llama-1.1B-${values.dtype}`);
  if (!existsSync(directory)) makeRandomModel(directory, { ...BENCHMARK_SIZES, ...MODELS['1.1B'], dtype: values.dtype });
  print(await promptRow(directory, values.dtype, values.cache, Number(threads), Number(values.samples)));
}
process.exit();
