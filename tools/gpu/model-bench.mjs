// Times a model on a GPU: a prompt of random token ids, then an answer. Prints one JSON row. In the test kit:
//   ./node tools/gpu/model-bench.mjs MODEL [--prompt-tokens 32768] [--answer-tokens 64] [--rows 8192]
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

/** The times of one answer: to its first token, and the median of the later ones. */
async function answer() {
  const milliseconds = [];
  const { user } = process.cpuUsage();
  for await (const token of generateTokens(runner, prompt, { maxTokens: answerTokens, endIds: [] })) {
    milliseconds.push(token.milliseconds);
  }
  const [first, ...later] = milliseconds;
  later.sort((a, b) => a - b);
  return { first, later: later[later.length >> 1], fastest: later[0], cpu: (process.cpuUsage().user - user) / 1000 };
}

await answer();
const { first, later, fastest, cpu } = await answer();
console.log(
  JSON.stringify({
    operation: 'model',
    device: device.name,
    layers: config.layers,
    hiddenSize: config.hiddenSize,
    dtype: runner.activations,
    promptTokens,
    answerTokens,
    maxBatchRows,
    openSeconds,
    firstTokenMilliseconds: first,
    millisecondsPerToken: later,
    fastestToken: fastest,
    cpuMilliseconds: cpu,
    deviceBytes: device.memory().live,
  }),
);
model.dispose();
