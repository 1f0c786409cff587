// Rows of docs/benchmarks/serving-simulated.json: what `kv simulate` says of all of SparseServe beside `base`.
//
//   node tools/bench/serving.mjs [--gpu h200] [--model lwm-7b] [--seeds 1] [--requests 100] [--rates 1.7]
//
// Needs built packages. Nothing is measured here: the same seeds give the same rows on any machine.
import { parseArgs } from 'node:util';
import { Costs, paperCosts, simulatedModels, simulateFigures } from '@kv/serve-scheduler';
import { keepRows, summarise } from './results.mjs';

const { values } = parseArgs({
  options: { gpu: { type: 'string', default: 'h200' }, model: { type: 'string', default: 'lwm-7b' }, seeds: { type: 'string', default: '1' }, requests: { type: 'string', default: '100' }, rates: { type: 'string' } },
});
const { gpu, model } = values;
const seeds = Array.from({ length: Number(values.seeds) }, (_, index) => index + 1);
const machines = {
  h200: { name: 'H200', costs: new Costs(), rates: { 'lwm-7b': [0.5, 0.7, 1.4], 'llama3-8b': [1.2, 2] } },
  a100: { name: "the paper's machine", costs: paperCosts(), rates: { 'lwm-7b': [0.125, 0.3], 'llama3-8b': [0.35, 0.6] } },
};
const { name: machine, costs, rates: ownRates } = machines[gpu];
const requests = Number(values.requests);
const rates = values.rates === undefined ? ownRates[model] : values.rates.split(',').map(Number);
/** Behind what any load saturates a longer trace shows more of. */
const served = requests === 100 ? `${machine}, ${model}` : `${machine}, ${model}, ${requests} requests`;

/** What of each figure becomes rows: the columns of ours and of the reference. */
const plans = [
  { figure: '10', what: 'mean time to the first token', unit: 'ms', better: 'lower', ours: 4, reference: 1, name: 'no feature' },
  { figure: '11', what: 'tokens', unit: 'tokens/s', better: 'higher', ours: 4, reference: 1, name: 'no feature' },
  { figure: '12', what: 'mean time between tokens', unit: 'ms', better: 'lower', ours: 4, reference: 1, name: 'no feature' },
  { figure: '15', what: 'blocks loaded in a step', unit: 'blocks', better: 'lower', ours: 4, reference: 3, name: 'no working-set control' },
  { figure: '16a', what: 'mean time to the first token, prompts in layer segments', unit: 'ms', better: 'lower', ours: 2, reference: 1, name: 'prompts in chunks' },
];

const date = new Date().toISOString().slice(0, 10);

function row(measure, { unit, better, name }, ours, reference) {
  const { layers, kvHeads, headDim, hiddenSize, deviceBytes } = simulatedModels[model];
  return {
    measure,
    shapes: { layers, kvHeads, headDim, hiddenSize, deviceBytes, requests, answerTokens: 512 },
    device: 'cuda',
    kind: 'simulated',
    unit,
    better,
    result: summarise(ours),
    reference: { name, ...summarise(reference) },
    date,
    machine: `simulated, by times of ${costs.gpu}`,
  };
}

const bySeed = [];
for (const seed of seeds) {
  const tables = await simulateFigures(['10', '11', '12', '13', '15', '16a'], { model, requests, seed, costs, rates });
  bySeed.push(Object.fromEntries(tables.map(({ figure, rows }) => [figure, rows])));
  console.log(`${machine}, ${model}, seed ${seed}: ${JSON.stringify(bySeed.at(-1))}`);
}
const column = (figure, line, index) => bySeed.map((tables) => tables[figure][line][index]);
const rows = plans.flatMap((plan) =>
  rates.map((rate, line) => {
    const measure = `${served}, ${rate} requests/s: ${plan.what}`;
    return row(measure, plan, column(plan.figure, line, plan.ours), column(plan.figure, line, plan.reference));
  }),
);
const perSecond = { unit: 'requests/s', better: 'higher' };
rows.push(row(`${served}: requests within the service level`, { ...perSecond, name: 'no feature' }, column('13', 5, 1), column('13', 0, 1)));
// The paper's wait of 2 s is a third as many iterations of its machine as of an H200.
if (gpu !== 'a100') rows.push(row(`${served}: requests within the service level, waiting as many iterations as on the paper's machine`, { ...perSecond, name: 'no feature' }, column('13', 5, 3), column('13', 0, 3)));
bySeed[0]['13'].slice(1).forEach(([system], before) => {
  const measure = `${served}: requests within the service level, ${system}`;
  rows.push(row(measure, { ...perSecond, name: 'one feature less' }, column('13', before + 1, 1), column('13', before, 1)));
});
keepRows('serving-simulated', 'Serving with all of SparseServe, simulated', rows);
