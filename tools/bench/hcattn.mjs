// Decode attention over codes beside dense decode attention, in turn: docs/benchmarks/hcattn-cpu.json.
// Needs built packages.
//
//   node tools/bench/hcattn.mjs [--tokens 4096,16384,131072] [--threads 1,2] [--seconds 3] [--megabytes 512] [--print]
//
// --seconds are for each row's works together, --megabytes what all layers' dense caches take at least.
import { parseArgs } from 'node:util';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { Shape } from './hcattn-works.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const TITLE = 'Attention over keys and values in codes, on the CPU';
const { values: options } = parseArgs({
  options: {
    tokens: { type: 'string', default: '4096,16384,131072' },
    threads: { type: 'string', default: '1,2' },
    seconds: { type: 'string', default: '3' },
    megabytes: { type: 'string', default: '512' },
    print: { type: 'boolean', default: false },
  },
});
const numbers = (list) => list.split(',').map(Number);

const quantized = [
  { name: 'INT8', make: (shape) => shape.quantized(8, 8), wanted: { 16384: { 2: 1.4 } } },
  { name: 'keys INT8, values INT4', make: (shape) => shape.quantized(8, 4) },
  { name: 'INT4', make: (shape) => shape.quantized(4, 4), wanted: { 16384: { 2: 1.6 } } },
];
const coded = [
  { name: '64 groups, 5 % chosen', make: (shape) => shape.coded(64), wanted: { 16384: { 2: 1 }, 131072: { 16: 1.6 } } },
  { name: '32 groups, 5 % chosen', make: (shape) => shape.coded(32), wanted: { 16384: { 2: 1 }, 131072: { 16: 2.2 } } },
];
/** Query heads, kv heads, dims. */
const models = [
  { heads: [32, 8, 128], works: [...quantized, ...coded] },
  { heads: [12, 4, 64], works: quantized },
  { heads: [8, 2, 64], works: quantized },
];

/** Milliseconds of each work, which are run in turn. */
async function timesOf(works) {
  const times = works.map(() => []);
  const end = performance.now() + 1000 * Number(options.seconds);
  for (let round = 0; round < 4 || performance.now() < end; round++) {
    for (const [index, work] of works.entries()) {
      const start = performance.now();
      await work.run();
      if (round > 0) times[index].push(performance.now() - start);
    }
  }
  return times.map(summarise);
}

async function rowsOf({ heads, works }, tokens, threads) {
  const device = createDevice({ threads });
  const layerBytes = 4 * heads[1] * heads[2] * tokens;
  const layers = Math.max(2, Math.ceil((1e6 * Number(options.megabytes)) / layerBytes));
  const shape = new Shape(device, { heads, tokens, layers });
  const made = [shape.dense(), ...works.map(({ make }) => make(shape))];
  const [dense, ...others] = await timesOf(made);
  const rows = [];
  for (const [index, { name, wanted }] of works.entries()) {
    const share = await made[index + 1].chosen?.();
    const ratio = wanted?.[tokens]?.[threads];
    rows.push({
      measure: `decode, ${name}, ${heads[0]}/${heads[1]} heads of ${heads[2]}, ${tokens} tokens, ${threads} thread${threads > 1 ? 's' : ''}`,
      shapes: `f16 beside codes, ${layers} layers`,
      device: 'cpu',
      kind: 'measured',
      unit: 'ms',
      better: 'lower',
      result: others[index],
      reference: { name: 'dense decode attention, f16', ...dense },
      ...(ratio === undefined ? {} : { target: { ratio } }),
      ...(share === undefined ? {} : { chosenShare: share }),
      instructionSet: device.instructionSet,
      threads,
      chart: tokens === 16384 || threads === 16,
      ...stamp(),
    });
  }
  for (const work of made) work.dispose();
  device.dispose?.();
  return rows;
}

for (const tokens of numbers(options.tokens)) {
  for (const threads of numbers(options.threads)) {
    for (const model of models) {
      const rows = await rowsOf(model, tokens, threads);
      if (!options.print) keepRows('hcattn-cpu', TITLE, rows);
      for (const { measure, result, reference, chosenShare } of rows) {
        const ratio = (kind) => (reference[kind] / result[kind]).toFixed(2);
        const chosen = chosenShare === undefined ? '' : `, ${(100 * chosenShare).toFixed(1)} % chosen`;
        console.log(`${measure}: ${result.median.toFixed(2)} ms, dense ${reference.median.toFixed(2)} ms, ${ratio('median')}x (least times ${ratio('low')}x)${chosen}`);
      }
    }
  }
}
