// Decode attention over quantized blocks beside dense decode attention, in turn: docs/benchmarks/hcattn-cpu.json.
// Needs built packages.
//
//   node tools/bench/hcattn.mjs [--samples 9] [--threads 2] [--print]
import { parseArgs } from 'node:util';
import { decodeAttentionQuantized, quantizedBlockBytes } from '../../packages/hcattn-quant/dist/index.js';
import * as core from '../../packages/sparse-core/dist/index.js';
import { keepRows, stamp, summarise } from './results.mjs';

const TITLE = 'Attention over quantized blocks, on the CPU';
const TOKENS = 16_384;
const BLOCK = 64;
const { values: options } = parseArgs({
  options: {
    samples: { type: 'string', default: '9' },
    threads: { type: 'string', default: '2' },
    print: { type: 'boolean', default: false },
  },
});
const samples = Number(options.samples);
const threads = Number(options.threads);
const device = core.createDevice({ threads });
const stream = device.createStream();
const settings = [
  { name: 'INT8', keyBits: 8, valueBits: 8, faster: 1.4 },
  { name: 'keys INT8, values INT4', keyBits: 8, valueBits: 4 },
  { name: 'INT4', keyBits: 4, valueBits: 4, faster: 1.6 },
];
// Query heads, kv heads, dims, and layers enough that a step reads several times the last-level cache.
const models = [
  { heads: [8, 2, 64], layers: 24 },
  { heads: [12, 4, 64], layers: 12 },
  { heads: [32, 8, 128], layers: 4 },
];

const rowAxes = ['token', 'queryHead', 'dim'];

/** What both operations take of the cache of one slot, all of whose blocks are in order. */
function tables(kvHeads) {
  const blocks = kvHeads * (TOKENS / BLOCK);
  return {
    blockTable: device.tensor('i32', ['slot', 'kvHead', 'block'], [1, kvHeads, TOKENS / BLOCK], Int32Array.from({ length: blocks }, (_, block) => block)),
    keyCounts: device.tensor('i32', ['slot', 'kvHead'], [1, kvHeads], new Int32Array(kvHeads).fill(TOKENS)),
  };
}

function densePool(kvHeads, headDim) {
  const shape = [kvHeads * (TOKENS / BLOCK), BLOCK, headDim];
  const length = shape[0] * shape[1] * shape[2];
  // f16 numbers of 0.25 to 0.5, and their negatives.
  const bits = Uint16Array.from({ length }, (_, index) => 0x3400 + ((index * 7919) % 1024) + (index % 3 === 0 ? 0x8000 : 0));
  return device.tensor('f16', ['block', 'blockToken', 'dim'], shape, bits);
}

function quantizedPool(kvHeads, headDim, bits) {
  const shape = [kvHeads * (TOKENS / BLOCK), quantizedBlockBytes(headDim, bits)];
  const firstScale = shape[1] - (BLOCK * headDim) / 32;
  // Scales of 2^-8: all codes are good.
  const byte = (index) => (index % shape[1] >= firstScale ? 0x58 : (index * 7919) % 127);
  return device.tensor('u8', ['quantizedBlock', 'byte'], shape, Uint8Array.from({ length: shape[0] * shape[1] }, (_, index) => byte(index)));
}

async function rowsOf({ heads: [queryHeads, kvHeads, headDim], layers }) {
  const numbers = Float32Array.from({ length: queryHeads * headDim }, (_, index) => Math.sin(index));
  const rows = {
    query: device.tensor('f32', rowAxes, [1, queryHeads, headDim], numbers),
    output: device.tensor('f32', rowAxes, [1, queryHeads, headDim]),
    slots: device.tensor('i32', ['batch'], [1], Int32Array.of(0)),
    queryStart: device.tensor('i32', ['boundary'], [2], Int32Array.of(0, 1)),
    scale: headDim ** -0.5,
  };
  const table = tables(kvHeads);
  const layersOf = (pools, step) => {
    const all = Array.from({ length: layers }, pools);
    // As the runner does: enqueued one by one, the layers would take the threads' time from them.
    return { all, recording: stream.record(() => all.forEach(step)) };
  };
  const works = [
    layersOf(
      () => ({ keys: densePool(kvHeads, headDim), values: densePool(kvHeads, headDim) }),
      (pools) => core.decodeAttention(stream, { ...rows, blocks: { ...pools, ...table } }),
    ),
    ...settings.map(({ keyBits, valueBits }) =>
      layersOf(
        () => ({ quantizedKeys: quantizedPool(kvHeads, headDim, keyBits), quantizedValues: quantizedPool(kvHeads, headDim, valueBits) }),
        (pools) => decodeAttentionQuantized(stream, { ...rows, ...pools, ...table, keyBits, valueBits }),
      ),
    ),
  ];
  const times = works.map(() => []);
  for (let sample = -1; sample < samples; sample++) {
    for (const [index, { recording }] of works.entries()) {
      const start = performance.now();
      stream.replay(recording);
      await stream.synchronize();
      if (sample >= 0) times[index].push(performance.now() - start);
    }
  }
  for (const { all, recording } of works) {
    recording.dispose();
    for (const tensor of all.flatMap(Object.values)) tensor.dispose();
  }
  const [dense, ...others] = times.map(summarise);
  const shapes = `${queryHeads}/${kvHeads} heads of ${headDim}, ${TOKENS} tokens, f16 beside codes, ${layers} layers`;
  return settings.map(({ name, faster }, index) => ({
    measure: `decode, ${name}, ${queryHeads}/${kvHeads} heads of ${headDim}, ${TOKENS} tokens, ${threads} threads, ${device.instructionSet}`,
    shapes,
    device: 'cpu',
    kind: 'measured',
    unit: 'ms',
    better: 'lower',
    result: others[index],
    reference: { name: 'dense decode attention, f16', ...dense },
    ...(faster === undefined ? {} : { target: { ratio: faster } }),
    threads,
    ...stamp(),
  }));
}

const results = [];
for (const model of models) results.push(...(await rowsOf(model)));
if (!options.print) keepRows('hcattn-cpu', TITLE, results);
for (const { measure, result, reference } of results) {
  const ratio = (reference.median / result.median).toFixed(2);
  console.log(`${measure}: ${result.median.toFixed(2)} ms [${result.low.toFixed(2)}], dense ${reference.median.toFixed(2)} ms [${reference.low.toFixed(2)}], ${ratio}x`);
}
