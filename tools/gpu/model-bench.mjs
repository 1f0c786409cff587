// Times a model on a GPU: prompts of arbitrary token ids, then answers. Prints rows for docs/benchmarks, one a line. In
// the test kit:
//   ./node tools/gpu/model-bench.mjs MODEL [--prompts 32768,1024,32768:1024,32768:hierasparse-k1-v1]... [--rounds 3]
//     [--seconds 60] [--answer-tokens 64] [--rows 8192] [--device cuda] [--memory-limit BYTES]
// A prompt is its number of tokens and, behind a colon, how many of them HBW-KV keeps, a policy of `kv`, as in
// 131072:skeleton=0.03 a preset of block-sparse prefill and its budget, or as in 131072:hcattn=64/f16 keys in codes with
// values on the host (bench-policies.mjs says what may stand there). Prompts of one list take turns, until so many
// rounds are done or so many seconds have passed; those of the next list begin when the memory of these is given back.
import { readdirSync, readFileSync } from 'node:fs';
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { generateTokens, Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { summarise } from '../bench/results.mjs';
import { openPolicy } from './bench-policies.mjs';

const { values, positionals } = parseArgs({
  options: {
    prompts: { type: 'string', multiple: true, default: ['32768,1024,32768:1024,32768:hierasparse-k1-v1'] },
    rounds: { type: 'string', default: '3' },
    seconds: { type: 'string', default: '60' },
    'answer-tokens': { type: 'string', default: '64' },
    rows: { type: 'string', default: '8192' },
    device: { type: 'string', default: 'cuda' },
    'memory-limit': { type: 'string' },
  },
  allowPositionals: true,
});
const [answerTokens, maxBatchRows, rounds] = [values['answer-tokens'], values.rows, values.rounds].map(Number);

const memoryLimit = values['memory-limit'];
const device = createDevice({ kind: values.device, memoryLimit: memoryLimit && Number(memoryLimit) });
const heldBytes = () => device.memory().live + device.memory().scratch;
const opened = performance.now();
const model = await Model.open(positionals[0], { device });
await device.defaultStream.synchronize();
const openSeconds = (performance.now() - opened) / 1000;
const weightBytes = heldBytes();
const { config } = model;

/** A prompt with a runner of its own. */
async function createCase(text) {
  const [tokens, cut] = text.split(':');
  const promptTokens = Number(tokens);
  const contextTokens = promptTokens + answerTokens;
  const before = heldBytes();
  const { policy, name, close } = await openPolicy(cut, model, { tokens: contextTokens, maxBatchRows });
  const runner = model.createRunner({ policy, contextTokens, maxBatchRows });
  const bytes = heldBytes() - before;
  const ids = Int32Array.from({ length: promptTokens }, (_, i) => (i * 7919 + 13) % config.vocabularySize);
  const reserved = runner.kvReserved;
  return { runner, close, ids, policy: name, bytes, mostBytes: bytes, reserved, answers: [] };
}

/** Processor time in ms: of the JavaScript thread, and of all others of the process. */
function threadTimes() {
  const times = { script: 0, native: 0 };
  for (const thread of readdirSync('/proc/self/task')) {
    const [nanoseconds] = readFileSync(`/proc/self/task/${thread}/schedstat`, 'utf8').split(' ');
    times[Number(thread) === process.pid ? 'script' : 'native'] += Number(nanoseconds) / 1e6;
  }
  return times;
}

/**
 * The times of one answer in ms: to its first token, of each later one, and what the host does for each of those that
 * follow the second; and the bytes of its cache at the end. Keeps account of the memory that the case holds.
 */
async function answer(each, ids = each.ids) {
  const { runner } = each;
  const before = heldBytes();
  let [most, kvBytes, density] = [before, 0, 1];
  const onReport = (report) => (density = report.density);
  const onProgress = () => (most = Math.max(most, heldBytes()));
  const milliseconds = [];
  const host = [];
  for await (const token of generateTokens(runner, ids, { maxTokens: answerTokens, endIds: [], onProgress, onReport })) {
    milliseconds.push(token.milliseconds);
    if (milliseconds.length === 2 || token.finishReason !== null) host.push(threadTimes());
    onProgress();
    if (token.finishReason !== null) kvBytes = runner.kvBytes.device;
  }
  each.mostBytes = Math.max(each.mostBytes, each.bytes + most - before);
  each.bytes += heldBytes() - before;
  const [first, ...later] = milliseconds;
  const share = (thread) => (host[1][thread] - host[0][thread]) / (later.length - 1);
  return { first, later, kvBytes, density, host: { script: share('script'), native: share('native') } };
}

/** The figures of a case: what each row is called, its unit, and the samples. */
function figuresOf({ answers, mostBytes, reserved }) {
  const onHost = reserved.host > 0 ? [['host memory of the cache', 'GiB', [reserved.host / 2 ** 30]]] : [];
  return [
    ['first token', 'ms', answers.map(({ first }) => first)],
    ['each later token', 'ms', answers.flatMap(({ later }) => later)],
    ['processor time of the JavaScript thread, each later token', 'ms', answers.map(({ host }) => host.script)],
    ['processor time of all other threads, each later token', 'ms', answers.map(({ host }) => host.native)],
    ['scores of the prompt computed', '%', answers.map(({ density }) => 100 * density)],
    ['key/value cache', 'GiB', answers.map(({ kvBytes }) => kvBytes / 2 ** 30)],
    ['device memory of the cache, in use or not', 'GiB', [reserved.device / 2 ** 30]],
    ['device memory with weights', 'GiB', [(weightBytes + mostBytes) / 2 ** 30]],
    ...onHost,
  ];
}

/** Median and spread, to as many digits as are worth printing. */
function summary(samples) {
  const { samples: count, ...figures } = summarise(samples);
  const entries = Object.entries(figures).map(([name, value]) => [name, Number(value.toPrecision(4))]);
  return { ...Object.fromEntries(entries), samples: count };
}

/** The rows of a case; `dense` is that of a prompt of its length, with which it took turns. */
function rowsOf(each, dense) {
  const { runner, ids, policy } = each;
  const { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize } = config;
  const model = { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize };
  const shapes = { ...model, dtype: runner.activations, promptTokens: ids.length, maxBatchRows, policy };
  const names = [`${ids.length} tokens of prompt`, runner.activations, policy].filter((name) => name !== 'dense');
  const references = dense === undefined || dense === each ? [] : figuresOf(dense);
  return figuresOf(each).map(([measure, unit, samples], index) => ({
    measure: [measure, ...names].join(', '),
    ...{ shapes, device: values.device, kind: 'measured', unit, better: 'lower', result: summary(samples) },
    ...(references[index] && { reference: { name: 'dense', ...summary(references[index][2]) } }),
    ...((measure.startsWith('processor time') || unit === '%') && { chart: false }),
    ...{ date: new Date().toISOString().slice(0, 10), machine: device.name },
  }));
}

/** Waits until what was disposed has been given back, on threads of its own. */
async function memoryIsBack() {
  for (let [bytes, wait] = [-1, 0]; bytes !== heldBytes() && wait < 100; wait += 1) {
    bytes = heldBytes();
    await setTimeout(50);
  }
}

for (const prompts of values.prompts) {
  const cases = [];
  for (const text of prompts.split(',')) cases.push(await createCase(text));
  // The first steps bring kernels in place, and record those of answers.
  for (const each of cases) await answer(each, each.ids.subarray(0, 2 * maxBatchRows));
  const started = performance.now();
  const isTime = () => performance.now() - started < 1000 * Number(values.seconds);
  for (let round = 0; round < rounds && (round === 0 || isTime()); round += 1) {
    for (const each of cases) each.answers.push(await answer(each));
  }
  for (const each of cases) {
    const dense = cases.find(({ policy, ids }) => policy === 'dense' && ids.length === each.ids.length);
    for (const row of rowsOf(each, dense)) console.log(JSON.stringify(row));
  }
  for (const each of cases) {
    each.runner.dispose();
    each.close();
  }
  await memoryIsBack();
}
const disposing = performance.now();
model.dispose();
const disposed = performance.now() - disposing;
console.error(
  `opened in ${openSeconds.toFixed(1)} s, disposed in ${disposed.toFixed(1)} ms; ${device.memory().peak} bytes on the device at most`,
);
