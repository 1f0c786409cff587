// Times answers and prompts over a cache in two memories beside our dense cache. Prints rows for docs/benchmarks, one a line.
// In the test kit:
//   ./node tools/gpu/serving-bench.mjs MODEL [--parts prompts,steps,reading,answers,fit,apart] [--prompt 32768] [--sequences 8]
//     [--long 131072] [--answers 32] [--rows 8192] [--rounds 2] [--steps 24] [--warm 200] [--device cuda]
import { parseArgs } from 'node:util';
import { Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { apart } from './serving-apart.mjs';
import { answers, fit, reading } from './serving-engine.mjs';
import { prompts } from './serving-prompts.mjs';
import { rowMaker } from './serving-rows.mjs';
import { steps } from './serving-steps.mjs';

const { values, positionals } = parseArgs({
  options: {
    parts: { type: 'string', default: 'prompts,steps,reading,answers,fit,apart' },
    prompt: { type: 'string', default: '32768' },
    sequences: { type: 'string', default: '8' },
    long: { type: 'string', default: '131072' },
    answers: { type: 'string', default: '32' },
    rows: { type: 'string', default: '8192' },
    rounds: { type: 'string', default: '2' },
    steps: { type: 'string', default: '24' },
    warm: { type: 'string', default: '200' },
    device: { type: 'string', default: 'cuda' },
  },
  allowPositionals: true,
});
const { parts, device: kind, ...given } = values;
const sizes = Object.fromEntries(Object.entries(given).map(([name, value]) => [name, Number(value)]));
const device = createDevice({ kind });
const model = await Model.open(positionals[0], { device });
const run = { model, sizes, row: rowMaker(model) };
for (const part of parts.split(',')) {
  const begun = performance.now();
  await { prompts, steps, reading, answers, fit, apart }[part](run);
  console.error(`${part}: ${((performance.now() - begun) / 1000).toFixed(1)} s`);
}
model.dispose();
