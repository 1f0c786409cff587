// Times a model on a GPU: prompts of arbitrary token ids, then answers. Prints rows for docs/benchmarks, one a line. In
// the test kit:
//   ./node tools/gpu/model-bench.mjs MODEL [--prompts 32768,1024,32768:1024,32768:hierasparse-k1-v1]
//     [--answer-tokens 64] [--rows 8192]
// A prompt is its number of tokens and, behind a colon, how many of them HBW-KV keeps or a policy of `kv`; prompts take
// turns.
import { readdirSync, readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { createPolicy } from '../../packages/cli/dist/policies.js';
import { hbw } from '../../packages/hbw-select/dist/index.js';
import { generateTokens, Model } from '../../packages/model/dist/index.js';
import { createDevice, kvPolicy } from '../../packages/sparse-core/dist/index.js';

const { values, positionals } = parseArgs({
  options: {
    prompts: { type: 'string', default: '32768,1024,32768:1024,32768:hierasparse-k1-v1' },
    'answer-tokens': { type: 'string', default: '64' },
    rows: { type: 'string', default: '8192' },
  },
  allowPositionals: true,
});
const [answerTokens, maxBatchRows] = [values['answer-tokens'], values.rows].map(Number);

const device = createDevice({ kind: 'cuda' });
const opened = performance.now();
const model = await Model.open(positionals[0], { device });
await device.defaultStream.synchronize();
const openSeconds = (performance.now() - opened) / 1000;
const { config } = model;

/** What stands behind a prompt's colon: its policy, and how its rows say so. */
function policyOf(cut) {
  if (cut === undefined) return { policy: kvPolicy(), suffix: '' };
  if (/^\d+$/.test(cut)) return { policy: kvPolicy({ select: hbw({ capacity: Number(cut) }) }), suffix: `, ${cut} kept` };
  return { policy: createPolicy(cut), suffix: `, ${cut}` };
}

/** A prompt with a runner of its own. */
function createCase(text) {
  const [tokens, cut] = text.split(':');
  const promptTokens = Number(tokens);
  const { policy, suffix } = policyOf(cut);
  const runner = model.createRunner({ policy, contextTokens: promptTokens + answerTokens, maxBatchRows });
  const ids = Int32Array.from({ length: promptTokens }, (_, i) => (i * 7919 + 13) % config.vocabularySize);
  return { runner, ids, name: `${promptTokens} tokens of prompt, ${runner.activations}${suffix}`, answers: [] };
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
 * follow the second.
 */
async function answer({ runner, ids }) {
  const milliseconds = [];
  const host = [];
  for await (const token of generateTokens(runner, ids, { maxTokens: answerTokens, endIds: [] })) {
    milliseconds.push(token.milliseconds);
    if (milliseconds.length === 2 || token.finishReason !== null) host.push(threadTimes());
  }
  const [first, ...later] = milliseconds;
  const share = (thread) => (host[1][thread] - host[0][thread]) / (later.length - 1);
  return { first, later, host: { script: share('script'), native: share('native') } };
}

function row({ runner, ids, name }, measure, samples) {
  const sorted = samples.toSorted((a, b) => a - b);
  const result = { median: sorted[sorted.length >> 1], low: sorted[0], high: sorted.at(-1), samples: sorted.length };
  const { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize } = config;
  const model = { layers, hiddenSize, intermediateSize, queryHeads, kvHeads, headDim, vocabularySize };
  return {
    measure: `${measure}, ${name}`,
    shapes: { ...model, dtype: runner.activations, promptTokens: ids.length, maxBatchRows },
    ...{ device: 'cuda', kind: 'measured', unit: 'ms', better: 'lower', result },
    ...{ date: new Date().toISOString().slice(0, 10), machine: device.name },
  };
}

const cases = values.prompts.split(',').map(createCase);
for (const each of cases) await answer(each);
for (let round = 0; round < 3; round += 1) {
  for (const each of cases) each.answers.push(await answer(each));
}
for (const each of cases) {
  const { answers } = each;
  const rows = [
    row(each, 'first token', answers.map(({ first }) => first)),
    row(each, 'each later token', answers.flatMap(({ later }) => later)),
    row(each, 'processor time of the JavaScript thread, each later token', answers.map(({ host }) => host.script)),
    row(each, 'processor time of all other threads, each later token', answers.map(({ host }) => host.native)),
  ];
  for (const measured of rows) console.log(JSON.stringify(measured));
  each.runner.dispose();
}
const disposing = performance.now();
model.dispose();
const disposed = performance.now() - disposing;
console.error(
  `opened in ${openSeconds.toFixed(1)} s, disposed in ${disposed.toFixed(1)} ms; ${device.memory().peak} bytes on the device at most`,
);
