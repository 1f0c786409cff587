// Times the sum of values in host memory as a step of answers has it: lists are in the device's memory, and what the host sums of
// them is sent there; the device sums the rest meanwhile. Beside it, in turns, as many bytes of values copied to the device in
// order. Prints rows for docs/benchmarks, one a line. In the test kit:
//   ./node tools/gpu/host-sums.mjs [--tokens 1048576] [--rounds 15] [--device cuda]
import { parseArgs } from 'node:util';
import { weightedValues } from '../../packages/hcattn-quant/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { summarise } from '../bench/results.mjs';

const { values: options } = parseArgs({
  options: { tokens: { type: 'string', default: '1048576' }, rounds: { type: 'string', default: '15' }, device: { type: 'string', default: 'cuda' } },
});
const [tokens, rounds] = [options.tokens, options.rounds].map(Number);
const [kvHeads, group, headDim, blockTokens, share] = [8, 4, 128, 64, 0.05];
const chosen = Math.floor(share * tokens);
// Each call of a recording sums other rows, so that no cache holds them.
const calls = 10;
const device = createDevice({ kind: options.device });
const stream = device.createStream();
const listAxes = { rows: ['token', 'kvHead', 'chosen'], weights: ['token', 'kvHead', 'chosen', 'groupHead'], counts: ['token', 'kvHead'] };
const listShapes = { rows: [1, kvHeads, chosen], weights: [1, kvHeads, chosen, group], counts: [1, kvHeads] };

/** `chosen` tokens of each kv head in ascending order, as rows of the pool. */
function randomRows() {
  const rows = new Int32Array(kvHeads * chosen);
  for (let head = 0; head < kvHeads; head += 1) {
    let [left, next] = [chosen, head * chosen];
    for (let token = 0; left > 0; token += 1) {
      if (Math.random() * (tokens - token) >= left) continue;
      rows[next++] = head * tokens + token;
      left -= 1;
    }
  }
  return rows;
}

async function* rowsOf(dtype, target) {
  const blocks = (kvHeads * tokens) / blockTokens;
  const values = await device.hostTensor(dtype, ['valueBlock', 'blockToken', 'dim'], [blocks, blockTokens, headDim]);
  const piece = 512;
  const elements = piece * blockTokens * headDim;
  const numbers = dtype === 'i8' ? Int8Array.from({ length: elements }, () => 255 * Math.random() - 127) : Uint16Array.from({ length: elements }, () => 0x3000 + 0xc00 * Math.random());
  for (let first = 0; first < blocks; first += piece) stream.write(values.slice('valueBlock', first, first + piece), numbers);
  const room = {
    hostValueRows: await device.hostTensor('i32', listAxes.rows, listShapes.rows),
    hostWeights: await device.hostTensor('f32', listAxes.weights, listShapes.weights),
    hostCounts: await device.hostTensor('i32', listAxes.counts, listShapes.counts),
  };
  const output = await device.hostTensor('f32', ['token', 'queryHead', 'dim'], [1, kvHeads * group, headDim]);
  const counts = device.tensor('i32', listAxes.counts, listShapes.counts, new Int32Array(kvHeads).fill(chosen));
  const weights = device.tensor('f32', listAxes.weights, listShapes.weights, Float32Array.from({ length: kvHeads * chosen * group }, () => Math.random() / chosen));
  const lists = Array.from({ length: calls }, () => device.tensor('i32', listAxes.rows, listShapes.rows, randomRows()));
  const copied = Math.ceil((kvHeads * chosen) / blockTokens);
  const copy = device.tensor(dtype, ['valueBlock', 'blockToken', 'dim'], [copied, blockTokens, headDim]);
  const recordings = {
    sum: stream.record(() => {
      for (const valueRows of lists) weightedValues(stream, { valueRows, weights, counts, values, output, ...room });
    }),
    copy: stream.record(() => {
      for (let call = 0; call < calls; call += 1) stream.copy(values.slice('valueBlock', call * copied, (call + 1) * copied), copy);
    }),
  };
  const times = { sum: [], copy: [] };
  for (let round = -2; round < rounds; round += 1) {
    for (const [name, recording] of Object.entries(recordings)) {
      await stream.synchronize();
      const begun = performance.now();
      stream.replay(recording);
      await stream.synchronize();
      if (round >= 0) times[name].push((performance.now() - begun) / calls);
    }
  }
  yield {
    measure: `sum of values on the host and by the device, ${100 * share}% of ${tokens} rows, ${dtype === 'i8' ? 'int8' : 'float16'}`,
    shapes: { tokens, kvHeads, group, headDim },
    ...{ device: device.kind, kind: 'measured', unit: 'ms', better: 'lower', result: summarise(times.sum) },
    reference: { name: 'the same bytes, copied over the link in order', ...summarise(times.copy) },
    ...{ target: { atMost: target }, date: new Date().toISOString().slice(0, 10), machine: device.name },
  };
  for (const each of [...Object.values(recordings), ...lists, ...Object.values(room), values, output, counts, weights, copy]) each.dispose();
}

for (const [dtype, target] of [['f16', 1.3], ['i8', 0.8]]) {
  for await (const row of rowsOf(dtype, target)) console.log(JSON.stringify(row));
}
stream.dispose();
