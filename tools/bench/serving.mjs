// Rows of docs/benchmarks/serving-simulated.json: what `kv simulate` says of all of SparseServe beside `base`.
//
//   node tools/bench/serving.mjs [--seeds 3]
//
// Needs built packages. Nothing is measured here: the same seeds give the same rows on any machine.
import { parseArgs } from 'node:util';
import { Costs, simulatedModels, simulateFigures } from '@kv/serve-scheduler';
import { keepRows, summarise } from './results.mjs';

const { values } = parseArgs({ options: { seeds: { type: 'string', default: '3' } } });
const seeds = Array.from({ length: Number(values.seeds) }, (_, index) => index + 1);
const rates = { 'lwm-7b': [1, 2], 'llama3-8b': [2, 4] };
const requests = 60;

/** What of each figure becomes rows: the columns of ours and of the reference. */
const plans = [
  { figure: '10', what: 'mean time to the first token', unit: 'ms', better: 'lower', ours: 4, reference: 1, name: 'no feature' },
  { figure: '11', what: 'tokens', unit: 'tokens/s', better: 'higher', ours: 4, reference: 1, name: 'no feature' },
  { figure: '12', what: 'mean time between tokens', unit: 'ms', better: 'lower', ours: 4, reference: 1, name: 'no feature' },
  { figure: '15', what: 'blocks loaded in a step, prompts in chunks', unit: 'blocks', better: 'lower', ours: 4, reference: 3, name: 'no working-set control' },
  { figure: '16a', what: 'mean time to the first token, prompts in layer segments', unit: 'ms', better: 'lower', ours: 2, reference: 1, name: 'prompts in chunks' },
];

const { gpu } = new Costs();
const date = new Date().toISOString().slice(0, 10);

function row(measure, model, { unit, better, name }, ours, reference) {
  const { layers, kvHeads, headDim, hiddenSize, deviceBytes } = simulatedModels[model];
  return {
    measure,
    shapes: { layers, kvHeads, headDim, hiddenSize, deviceBytes, requests },
    device: 'cuda',
    kind: 'simulated',
    unit,
    better,
    result: summarise(ours),
    reference: { name, ...summarise(reference) },
    date,
    machine: `simulated, by times of ${gpu}`,
  };
}

const rows = [];
for (const model of Object.keys(rates)) {
  const bySeed = [];
  for (const seed of seeds) {
    const tables = await simulateFigures(['10', '11', '12', '13', '15', '16a'], { model, requests, seed, rates: rates[model] });
    bySeed.push(Object.fromEntries(tables.map(({ figure, rows }) => [figure, rows])));
    console.log(`${model}, seed ${seed}: done`);
  }
  const column = (figure, line, index) => bySeed.map((tables) => tables[figure][line][index]);
  for (const plan of plans) {
    rates[model].forEach((rate, line) => {
      const measure = `${model}, ${rate} requests/s: ${plan.what}`;
      rows.push(row(measure, model, plan, column(plan.figure, line, plan.ours), column(plan.figure, line, plan.reference)));
    });
  }
  const goodput = { unit: 'requests/s', better: 'higher', name: 'no feature' };
  rows.push(row(`${model}: requests within the service level`, model, goodput, column('13', 5, 1), column('13', 0, 1)));
}
keepRows('serving-simulated', 'Serving with all of SparseServe, simulated', rows);
