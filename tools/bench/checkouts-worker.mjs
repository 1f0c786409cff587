// The works that checkouts.mjs times. Prints their names, then the milliseconds of each one that is asked for.
import { createInterface } from 'node:readline';
import { promptOf } from './measure.mjs';

const [checkout, threads, directories] = process.argv.slice(2).map((text) => JSON.parse(text));
const packageOf = (name) => import(`${checkout}/packages/${name}/dist/index.js`);
const core = await packageOf('sparse-core');
const { hcAttentionStore } = await packageOf('hcattn-quant');
const { hieraSparsePrefill, hieraSparseStore } = await packageOf('hierasparse');
const { generateTokens, Model } = await packageOf('model');
const device = core.createDevice({ threads });
const stream = device.createStream();
const queryAxes = ['token', 'queryHead', 'dim'];
const shapes = [
  [8, 2, 64],
  [32, 8, 128],
];
const [promptTokens, answerTokens, leastMilliseconds] = [512, 32, 60];

function normals(axes, shape) {
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return device.tensor('f32', axes, shape, Float32Array.from({ length: shape.reduce((a, b) => a * b) }, normal));
}

/** A store of one layer with a prompt, whose last rows or next token attend. */
function attention([queryHeads, kvHeads, headDim], { prefill = core.densePrefill(), store: factory }, tokens, rows) {
  const layer = { index: 0, queryHeads, kvHeads, headDim };
  const [store] = factory.create([layer], { device, slots: 1, tokensPerSlot: tokens, tokens, prefill });
  const keys = normals(['token', 'kvHead', 'dim'], [tokens, kvHeads, headDim]);
  const all = core.createRowBatch(device, stream, [{ slot: 0, position: 0, rows: tokens }]);
  store.prepare(stream, all);
  store.append(stream, { batch: all, keys, values: keys });
  store.advance(all);
  const query = normals(queryAxes, [rows, queryHeads, headDim]);
  const output = device.tensor('f32', queryAxes, [rows, queryHeads, headDim]);
  const batch = core.createRowBatch(device, stream, [{ slot: 0, position: tokens - rows, rows }]);
  const scale = headDim ** -0.5;
  if (rows > 1) {
    const last = keys.slice('token', tokens - rows, tokens);
    return () => prefill.attend(stream, { store, batch, endsPrompt: [false], query, keys: last, values: last, output, scale });
  }
  store.finishPrefill?.(stream, 0);
  return () => store.startDecode(stream, { batch, query, output, scale })();
}

const works = {};
const sparse = { keys: 1, values: 1 };
for (const shape of shapes) {
  const heads = `${shape[0]}/${shape[1]} heads of ${shape[2]}`;
  for (const dtype of ['f16', 'bf16', 'f32']) {
    const dense = { store: core.densePagedStore({ dtype }) };
    works[`decode over 8192 tokens, ${heads}, ${dtype}`] = () => attention(shape, dense, 8192, 1);
    works[`128 rows of a prompt of 2048, ${heads}, ${dtype}`] = () => attention(shape, dense, 2048, 128);
  }
  for (const dtype of ['f16', 'bf16']) {
    const policy = { prefill: hieraSparsePrefill(sparse), store: hieraSparseStore({ ...sparse, dtype }) };
    works[`decode over 8192 tokens in 2:4 blocks, ${heads}, ${dtype}`] = () => attention(shape, policy, 8192, 1);
    works[`128 rows of a prompt of 2048 in 2:4 blocks, ${heads}, ${dtype}`] = () => attention(shape, policy, 2048, 128);
  }
  for (const bits of [8, 4]) {
    const policy = { store: hcAttentionStore({ keys: `int${bits}`, values: `int${bits}`, valuesOn: 'device' }) };
    works[`decode over 8192 tokens in codes of ${bits} bits, ${heads}`] = () => attention(shape, policy, 8192, 1);
  }
}
for (const [dtype, directory] of Object.entries(directories)) {
  const runnerOf = async () => (await Model.open(directory, { device })).createRunner({ contextTokens: promptTokens + 2 * answerTokens });
  const generate = async (runner, tokens, count) => {
    for await (const token of generateTokens(runner, promptOf(tokens), { maxTokens: count, endIds: [] })) void token;
  };
  works[`prompt of ${promptTokens} tokens, 125M, ${dtype}`] = async () => {
    const runner = await runnerOf();
    return () => generate(runner, promptTokens, 1);
  };
  works[`${answerTokens} tokens of an answer, 125M, ${dtype}`] = async () => {
    const runner = await runnerOf();
    return () => generate(runner, 1, answerTokens);
  };
}

/** Milliseconds of one call, of as many as take long enough. */
async function timed(work) {
  let calls = 0;
  const start = performance.now();
  while (performance.now() - start < leastMilliseconds) {
    await work();
    await stream.synchronize();
    calls++;
  }
  return (performance.now() - start) / calls;
}

console.log(JSON.stringify(Object.keys(works)));
let [open, work] = [];
for await (const name of createInterface({ input: process.stdin })) {
  if (name !== open) [open, work] = [name, await works[name]()];
  console.log(await timed(work));
}
process.exit();
