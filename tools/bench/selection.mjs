// Choosing and moving the tokens that a cache keeps, beside the dense prefill attention of the same layer:
// docs/benchmarks/selection-cpu.json. Needs built packages.
//
//   node tools/bench/selection.mjs [--samples 9] [--threads 2]
import { parseArgs } from 'node:util';
import { hbw, snapKv } from '../../packages/hbw-select/dist/index.js';
import * as core from '../../packages/sparse-core/dist/index.js';
import { keepRows, stamp, summarise } from './results.mjs';

const TITLE = 'Choosing what a cache keeps, on the CPU';
const { values: options } = parseArgs({
  options: { samples: { type: 'string', default: '9' }, threads: { type: 'string', default: '2' } },
});
const samples = Number(options.samples);
const threads = Number(options.threads);
// The heads of models/needle-8m.
const [queryHeads, kvHeads, headDim, tokens] = [8, 2, 64, 16_384];
const shapes = `${queryHeads}/${kvHeads} heads of ${headDim}, ${tokens} tokens, f16 cache`;
const scale = headDim ** -0.5;

const device = core.createDevice({ threads });
const stream = device.createStream();
const layer = { index: 0, queryHeads, kvHeads, headDim };
const capacity = { device, slots: 1, tokensPerSlot: tokens, tokens };
const [store] = core.densePagedStore({ dtype: 'f16' }).create([layer], capacity);
const batch = core.createRowBatch(device, stream, [{ slot: 0, position: 0, rows: tokens }]);
const normals = (heads) => {
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return Float32Array.from({ length: tokens * heads * headDim }, normal);
};
const keys = device.tensor('f32', ['token', 'kvHead', 'dim'], [tokens, kvHeads, headDim], normals(kvHeads));
const queryShape = [tokens, queryHeads, headDim];
const query = device.tensor('f32', ['token', 'queryHead', 'dim'], queryShape, normals(queryHeads));
const output = device.tensor('f32', ['token', 'queryHead', 'dim'], queryShape);

function readPrompt() {
  store.release(stream, 0);
  store.prepare(stream, batch);
  store.append(stream, { batch, keys, values: keys });
  store.advance(batch);
}

/** Milliseconds until what `work` enqueues is done. */
async function timed(work) {
  await stream.synchronize();
  const start = performance.now();
  await work();
  await stream.synchronize();
  return performance.now() - start;
}

function attend() {
  const { slots, queryStart } = batch;
  core.prefillAttention(stream, { query, output, blocks: store.denseBlocks(), slots, queryStart, scale });
}

async function choose(selector) {
  const lastQueries = query.slice('token', tokens - selector.observationWindow, tokens);
  return await selector.select(stream, { store, slot: 0, lastQueries, scale });
}

function keep(selection) {
  store.keep(stream, 0, selection);
  selection.indices.dispose();
}

const chosen = (selector) => async () => keep(await choose(selector));
const selectors = { 'hbw 1024': hbw({ capacity: 1024 }), 'SnapKV 1024': snapKv({ capacity: 1024 }) };
const gathers = { blocks: hbw({ capacity: 4096 }), singles: hbw({ capacity: 4096, blockTokens: 1 }) };
const names = ['attention', ...Object.keys(selectors), ...Object.keys(gathers)];
const times = Object.fromEntries(names.map((name) => [name, []]));
for (let sample = -1; sample < samples; sample++) {
  const measured = {};
  readPrompt();
  measured.attention = await timed(attend);
  for (const [name, selector] of Object.entries(selectors)) {
    readPrompt();
    measured[name] = await timed(chosen(selector));
  }
  for (const [name, selector] of Object.entries(gathers)) {
    readPrompt();
    const selection = await choose(selector);
    measured[name] = await timed(() => keep(selection));
  }
  // The first round warms the code.
  if (sample >= 0) for (const [name, time] of Object.entries(measured)) times[name].push(time);
}

const common = { shapes, device: 'cpu', kind: 'measured', unit: 'ms', better: 'lower', threads, ...stamp() };
const ratioRows = Object.keys(selectors).map((name) => ({
  measure: `scores, selection and gather, ${name}, ${tokens} tokens, ${threads} threads`,
  ...common,
  result: summarise(times[name]),
  reference: { name: 'dense prefill attention of the layer', ...summarise(times.attention) },
  target: { ratio: 50 },
}));
const gatherRow = {
  measure: `gather of 4096 tokens of ${tokens} in blocks of 128, ${threads} threads`,
  ...common,
  result: summarise(times.blocks),
  reference: { name: 'gather of single tokens', ...summarise(times.singles) },
};
keepRows('selection-cpu', TITLE, [...ratioRows, gatherRow]);
for (const { measure, result, reference } of [...ratioRows, gatherRow]) {
  const theirs = `${reference.name} ${reference.median.toFixed(2)} ms`;
  console.log(`${measure}: ${result.median.toFixed(2)} ms, ${theirs}`);
}
