// Attention over 2:4 sparse blocks beside dense attention, in turn: docs/benchmarks/attention-24-cpu.json.
// Needs built packages.
//
//   node tools/bench/attention-24.mjs [--samples 9] [--threads 2]
import { parseArgs } from 'node:util';
import { hieraSparsePrefill, hieraSparseStore } from '../../packages/hierasparse/dist/index.js';
import * as core from '../../packages/sparse-core/dist/index.js';
import { keepRows, processor, stamp, summarise } from './results.mjs';

const TITLE = 'Attention over 2:4 sparse blocks, on the CPU';
const { values: options } = parseArgs({
  options: { samples: { type: 'string', default: '9' }, threads: { type: 'string', default: '2' } },
});
const samples = Number(options.samples);
const threads = Number(options.threads);
const device = core.createDevice({ threads });
const stream = device.createStream();
const settings = [
  { keys: 0, values: 1 },
  { keys: 0.5, values: 0.5 },
  { keys: 1, values: 1 },
];
// Query heads, kv heads, dims, as of our small model, Qwen3-1.7B and Llama-3.1-8B; layers enough that a decode step
// reads several times the last-level cache.
const models = [
  { heads: [8, 2, 64], layers: 24 },
  { heads: [16, 8, 128], layers: 4 },
  { heads: [32, 8, 128], layers: 4 },
];

function normals(axes, shape) {
  const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return device.tensor(
    'f32',
    axes,
    shape,
    Float32Array.from({ length: shape.reduce((a, b) => a * b) }, normal),
  );
}

/** Milliseconds until what `work` enqueues is done. */
async function timed(work) {
  await stream.synchronize();
  const start = performance.now();
  await work();
  await stream.synchronize();
  return performance.now() - start;
}

/** The times of each of `works`, taken in turn; the first round warms the code. */
async function inTurn(works) {
  const times = works.map(() => []);
  for (let sample = -1; sample < samples; sample++) {
    for (const [index, { prepare, work }] of works.entries()) {
      prepare?.();
      const time = await timed(work);
      if (sample >= 0) times[index].push(time);
    }
  }
  return times.map(summarise);
}

/** The stores of a policy's layers, one prompt appended to each. */
function filled({ prefill, store: factory }, [queryHeads, kvHeads, headDim], layers, tokens, rows) {
  const all = Array.from({ length: layers }, (_, index) => ({ index, queryHeads, kvHeads, headDim }));
  const stores = factory.create(all, { device, slots: 1, tokensPerSlot: tokens, tokens, prefill });
  const fill = (store) => {
    const batch = core.createRowBatch(device, stream, [{ slot: 0, position: 0, rows: tokens }]);
    store.release(stream, 0);
    store.prepare(stream, batch);
    store.append(stream, { batch, keys: rows, values: rows });
    store.advance(batch);
    batch.dispose();
  };
  for (const store of stores) fill(store);
  return { stores, fill };
}

const queryAxes = ['token', 'queryHead', 'dim'];

async function decodeRows({ heads, layers }, tokens, dtype) {
  const [queryHeads, kvHeads, headDim] = heads;
  const rows = normals(['token', 'kvHead', 'dim'], [tokens, kvHeads, headDim]);
  const query = normals(queryAxes, [1, queryHeads, headDim]);
  const output = device.tensor('f32', queryAxes, [1, queryHeads, headDim]);
  const batch = core.createRowBatch(device, stream, [{ slot: 0, position: tokens - 1, rows: 1 }]);
  const caches = [
    core.densePagedStore({ dtype }),
    ...settings.map((shares) => hieraSparseStore({ ...shares, dtype })),
  ];
  const works = caches.map((cache) => {
    const { stores } = filled({ store: cache }, heads, layers, tokens, rows);
    for (const store of stores) store.finishPrefill?.(stream, 0);
    const step = (store) => store.startDecode(stream, { batch, query, output, scale: headDim ** -0.5 })();
    // As the runner does: enqueued one by one, the layers would take the threads' time from them.
    const recording = stream.record(() => stores.forEach(step));
    return { stores, recording, work: () => stream.replay(recording) };
  });
  const times = await inTurn(works);
  const used = works.flatMap(({ stores, recording }) => [recording, ...stores]);
  for (const each of [...used, rows, query, output]) each.dispose();
  return rowsOf('decode', heads, tokens, dtype, times, 1.4);
}

async function prefillRows({ heads }, tokens, dtype) {
  const [queryHeads, kvHeads, headDim] = heads;
  const rows = normals(['token', 'kvHead', 'dim'], [tokens, kvHeads, headDim]);
  const query = normals(queryAxes, [tokens, queryHeads, headDim]);
  const output = device.tensor('f32', queryAxes, [tokens, queryHeads, headDim]);
  const batch = core.createRowBatch(device, stream, [{ slot: 0, position: 0, rows: tokens }]);
  const policies = [
    { prefill: core.densePrefill(), store: core.densePagedStore({ dtype }) },
    ...settings.map((shares) => ({
      prefill: hieraSparsePrefill(shares),
      store: hieraSparseStore({ ...shares, dtype }),
    })),
  ];
  const works = policies.map((policy) => {
    const { stores, fill } = filled(policy, heads, 1, tokens, rows);
    const [store] = stores;
    const call = { store, batch, endsPrompt: [false], query, keys: rows, values: rows, output, scale: headDim ** -0.5 };
    return { stores, prepare: () => fill(store), work: () => policy.prefill.attend(stream, call) };
  });
  const times = await inTurn(works);
  for (const each of [...works.flatMap(({ stores }) => stores), rows, query, output]) each.dispose();
  return rowsOf('prefill, pruning and compression included,', heads, tokens, dtype, times, 1);
}

/** One row a setting; the last, all sparse, has a target: this many times as fast as dense. */
function rowsOf(what, [queryHeads, kvHeads, headDim], tokens, dtype, [dense, ...others], faster) {
  const shapes = `${queryHeads}/${kvHeads} heads of ${headDim}, ${tokens} tokens, ${dtype} cache`;
  return settings.map(({ keys, values }, index) => ({
    measure: `${what} S_K = ${keys}, S_V = ${values}, ${queryHeads}/${kvHeads} heads of ${headDim}, ${tokens} tokens, ${dtype}, ${threads} threads, ${device.instructionSet}, ${processor()}`,
    shapes,
    device: 'cpu',
    kind: 'measured',
    unit: 'ms',
    better: 'lower',
    result: others[index],
    reference: { name: 'dense attention', ...dense },
    ...(keys + values === 2 ? { target: { ratio: faster } } : {}),
    threads,
    ...stamp(),
  }));
}

const results = [];
for (const dtype of ['f16', 'bf16']) {
  for (const model of models) results.push(...(await decodeRows(model, 16_384, dtype)));
}
for (const model of models) results.push(...(await prefillRows(model, 4096, 'f16')));
keepRows('attention-24-cpu', TITLE, results);
for (const { measure, result, reference } of results) {
  const ratio = reference.median / result.median;
  console.log(
    `${measure}: ${result.median.toFixed(2)} ms, dense ${reference.median.toFixed(2)} ms, ${ratio.toFixed(
      2,
    )}x`,
  );
}
