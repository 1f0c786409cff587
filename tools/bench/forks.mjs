// Times the fork of a long prompt in the caches of all layers, and says what it takes. Prints rows for docs/benchmarks,
// one a line:
//   node tools/bench/forks.mjs [--device cuda] [--tokens 32768] [--layers 32] [--kv-heads 8] [--head-dim 128] [--rounds 20]
import { parseArgs } from 'node:util';
import { hieraSparseStore } from '../../packages/hierasparse/dist/index.js';
import { createDevice, createRowBatch, densePagedStore } from '../../packages/sparse-core/dist/index.js';
import { stamp, summarise } from './results.mjs';

const { values } = parseArgs({
  options: {
    device: { type: 'string', default: 'cpu' },
    tokens: { type: 'string', default: '32768' },
    layers: { type: 'string', default: '32' },
    'kv-heads': { type: 'string', default: '8' },
    'head-dim': { type: 'string', default: '128' },
    rounds: { type: 'string', default: '20' },
  },
});
const [given, layerCount, rounds] = [values.tokens, values.layers, values.rounds].map(Number);
const [kvHeads, headDim] = [values['kv-heads'], values['head-dim']].map(Number);
const chunkRows = 4096;
// The last block of each head is half full, and so the one that is copied.
const tokens = given - 32;

const device = createDevice({ kind: values.device, threads: 2 });
const layers = Array.from({ length: layerCount }, (_, index) => ({ index, queryHeads: kvHeads, kvHeads, headDim }));
const stores = {
  dense: densePagedStore({ dtype: 'f16' }),
  'S_K = S_V = 1': hieraSparseStore({ keys: 1, values: 1, dtype: 'f16' }),
  'S_K = S_V = 0.5': hieraSparseStore({ keys: 0.5, values: 0.5, dtype: 'f16' }),
};

/** Fills slot 0 of every layer. */
function read(stream, made) {
  for (let position = 0; position < tokens; position += chunkRows) {
    const rows = Math.min(chunkRows, tokens - position);
    const shape = [rows, kvHeads, headDim];
    const elements = Uint16Array.from({ length: rows * kvHeads * headDim }, (_, index) => 0x3000 + ((index * 7919) % 0x0c00));
    const keys = device.tensor('f16', ['token', 'kvHead', 'dim'], shape, elements);
    const batch = createRowBatch(device, stream, [{ slot: 0, position, rows }]);
    for (const store of made) {
      store.prepare(stream, batch);
      store.append(stream, { batch, keys, values: keys });
      store.advance(batch);
    }
    for (const each of [batch, keys]) each.dispose();
  }
  for (const store of made) store.finishPrefill?.(stream, 0);
}

for (const [name, factory] of Object.entries(stores)) {
  // The blocks of a fork's local window may become sparse too.
  const capacity = { device, slots: 2, tokensPerSlot: given, tokens: given + 1024, batchRows: chunkRows, rowDType: 'f16' };
  const made = factory.create(layers, capacity);
  const stream = device.createStream();
  const bytes = () => made.reduce((sum, store) => sum + store.bytes().device, 0);
  read(stream, made);
  await stream.synchronize();
  const samples = [];
  const before = bytes();
  let forkBytes = 0;
  for (let round = 0; round <= rounds; round += 1) {
    const start = performance.now();
    for (const store of made) store.copy(stream, 0, 1);
    await stream.synchronize();
    // The first round loads the kernel and compiles the script.
    if (round > 0) samples.push(performance.now() - start);
    if (round === rounds) forkBytes = bytes() - before;
    for (const store of made) store.release(stream, 1);
    await stream.synchronize();
  }
  const shapes = { layers: layerCount, kvHeads, headDim, tokens, dtype: 'f16', blocksOfFork: layerCount * kvHeads };
  console.log(
    JSON.stringify({
      measure: `fork of ${tokens} tokens in ${layerCount} layers, ${name}, ${values.device}`,
      ...{ shapes: { ...shapes, forkBytes, sequenceBytes: before }, kind: 'measured', unit: 'ms', better: 'lower' },
      ...{ device: values.device, result: summarise(samples), ...stamp() },
    }),
  );
  for (const store of made) store.dispose();
  stream.dispose();
}
