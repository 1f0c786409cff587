// Times a model on a GPU: prompts of arbitrary token ids, then answers. Prints rows for docs/benchmarks, one a line. In
// the test kit:
//   ./node tools/gpu/model-bench.mjs MODEL [--prompt-tokens 32768] [--answer-tokens 64] [--rows 8192]
import { readdirSync, readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { generateTokens, Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';

const { values, positionals } = parseArgs({
  options: {
    'prompt-tokens': { type: 'string', default: '32768' },
    'answer-tokens': { type: 'string', default: '64' },
    rows: { type: 'string', default: '8192' },
  },
  allowPositionals: true,
});
const [promptTokens, answerTokens, maxBatchRows] = ['prompt-tokens', 'answer-tokens', 'rows'].map((name) =>
  Number(values[name]),
);

const device = createDevice({ kind: 'cuda' });
const opened = performance.now();
const model = await Model.open(positionals[0], { device });
await device.defaultStream.synchronize();
const openSeconds = (performance.now() - opened) / 1000;
const { config } = model;
const runner = model.createRunner({ contextTokens: promptTokens + answerTokens, maxBatchRows });
const prompt = Int32Array.from({ length: promptTokens }, (_, i) => (i * 7919 + 13) % config.vocabularySize);

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
 * follow the second.
 */
async function answer() {
  const milliseconds = [];
  const host = [];
  for await (const token of generateTokens(runner, prompt, { maxTokens: answerTokens, endIds: [] })) {
    milliseconds.push(token.milliseconds);
    if (milliseconds.length === 2 || token.finishReason !== null) host.push(threadTimes());
  }
  const [first, ...later] = milliseconds;
  const share = (thread) => (host[1][thread] - host[0][thread]) / (later.length - 1);
  return { first, later, host: { script: share('script'), native: share('native') } };
}

function row(measure, samples) {
  const sorted = samples.toSorted((a, b) => a - b);
  const result = { median: sorted[sorted.length >> 1], low: sorted[0], high: sorted.at(-1), samples: sorted.length };
  const { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize } = config;
  const model = { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize };
  return {
    measure,
    shapes: { ...model, dtype: runner.activations, promptTokens, maxBatchRows },
    ...{ device: 'cuda', kind: 'measured', unit: 'ms', better: 'lower', result },
    ...{ date: new Date().toISOString().slice(0, 10), machine: device.name },
  };
}

await answer();
const answers = [await answer(), await answer(), await answer()];
const rows = [
  row(`first token, ${promptTokens} tokens of prompt`, answers.map(({ first }) => first)),
  row(`each later token, ${promptTokens} tokens of prompt`, answers.flatMap(({ later }) => later)),
  row(`processor time of the JavaScript thread, each later token, ${promptTokens} tokens of prompt`, answers.map(({ host }) => host.script)),
  row(`processor time of all other threads, each later token, ${promptTokens} tokens of prompt`, answers.map(({ host }) => host.native)),
];
for (const each of rows) console.log(JSON.stringify(each));
console.error(`opened in ${openSeconds.toFixed(1)} s; ${device.memory().live} bytes on the device`);
runner.dispose();
model.dispose();
