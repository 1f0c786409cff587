// Makes rows of docs/benchmarks/skeleton-quality.json of what stores.mjs wrote with --settings prompt-settings.
//
//   node tools/bench/retrieval/prompt-rows.mjs --machine 'name, cores' raw.jsonl
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { settings } from './prompt-settings.mjs';
import { answerFigures, groupBy, mean, ofCommonItems, percentOf, readResults, round } from './summaries.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const results = readResults(positionals);
const lengths = [...new Set(results.map(({ length }) => length))].sort((a, b) => a - b);
const tokensOf = lengths.map((length) => length.toLocaleString('en-US')).join(' and ');

function figuresOf(answers) {
  return answerFigures(percentOf(answers), [...groupBy(answers, ({ task }) => task).values()].map(percentOf));
}

const measured = settings.filter(({ name }) => results.some(({ setting }) => setting === name));
const rows = measured.map(({ name }) => {
  const ofBoth = groupBy(ofCommonItems(results, [...new Set(['dense', name])]), ({ setting }) => setting);
  const [own, dense] = [ofBoth.get(name), ofBoth.get('dense')];
  const densities = lengths.map((length) => mean(own.filter((each) => each.length === length).map(({ density }) => density)));
  const shares = lengths.map((length, index) => [length, round(100 * densities[index], 1)]);
  const { error } = percentOf(own);
  console.log(name, figuresOf(own), round(error, 2), shares);
  return {
    measure: `right answers, prompts ${name}`,
    shapes: `needle-8m, ${own.length} examples of 7 tasks of ${tokensOf} tokens`,
    ...{ device: results[0].device, kind: 'small-model', unit: '% right', better: 'higher', result: figuresOf(own) },
    ...(name !== 'dense' && { reference: { name: 'dense', ...figuresOf(dense) } }),
    chart: false,
    standardError: round(error, 2),
    // In % of the blocks, by the tokens of a prompt.
    computed: Object.fromEntries(shares),
    date: stamp().date,
    machine: values.machine,
  };
});
keepRows('skeleton-quality', 'Sparse Skeleton: what it leaves out, and what that costs', rows);
