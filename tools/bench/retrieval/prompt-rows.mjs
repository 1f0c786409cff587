// Makes rows of docs/benchmarks/skeleton-quality.json of what stores.mjs wrote with --settings prompt-settings.
//
//   node tools/bench/retrieval/prompt-rows.mjs --machine 'name, cores' raw.jsonl
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { settings } from './prompt-settings.mjs';
import { answerFigures, groupBy, mean, percentOf, readResults, round } from './summaries.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const results = readResults(positionals, settings.length);
const lengths = [...new Set(results.map(({ length }) => length))].sort((a, b) => a - b);

function scoreOf(name) {
  const own = results.filter(({ setting }) => setting === name);
  const ofTasks = [...groupBy(own, ({ task }) => task).values()].map(percentOf);
  const densities = lengths.map((length) => mean(own.filter((each) => each.length === length).map(({ density }) => density)));
  return { all: percentOf(own), figures: answerFigures(percentOf(own), ofTasks), densities };
}

const dense = scoreOf('dense').figures;
const rows = settings.map(({ name }) => {
  const { all, figures, densities } = scoreOf(name);
  const shares = lengths.map((length, index) => [length, round(100 * densities[index], 1)]);
  console.log(name, figures, round(all.error, 2), shares);
  return {
    measure: `right answers, prompts ${name}`,
    shapes: `needle-8m, ${all.samples} examples of 7 tasks of ${lengths.map((length) => length.toLocaleString('en-US')).join(' and ')} tokens`,
    ...{ device: results[0].device, kind: 'small-model', unit: '% right', better: 'higher', result: figures },
    ...(name !== 'dense' && { reference: { name: 'dense', ...dense } }),
    chart: false,
    standardError: round(all.error, 2),
    // In % of the blocks, by the tokens of a prompt.
    computed: Object.fromEntries(shares),
    date: stamp().date,
    machine: values.machine,
  };
});
keepRows('skeleton-quality', 'Sparse Skeleton: what it leaves out, and what that costs', rows);
