// Makes rows of what run.mjs wrote, and the tables of docs/methods/hbw-select.md.
//
//   node tools/bench/retrieval/rows.mjs --machine 'name, cores' raw-*.jsonl
import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { ablations, reference, selections, shares, ways } from './selections.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const page = new URL('../../../docs/methods/hbw-select.md', import.meta.url);
const moments = ['question-aware', 'question-agnostic'];
const lengths = [1024, 2048, 4096, 8192];

/** A result of a later file replaces an earlier one; an example counts when it was asked under every selection. */
function readResults() {
  const byKey = new Map();
  // A run that was cut short ends in half a line.
  const lines = positionals.flatMap((file) => readFileSync(file, 'utf8').split('\n').filter((line) => line.endsWith('}')));
  for (const result of lines.map((line) => JSON.parse(line))) {
    byKey.set(`${result.id} ${result.policy} ${result.moment}`, result);
  }
  const counts = new Map();
  for (const { id } of byKey.values()) counts.set(id, (counts.get(id) ?? 0) + 1);
  return [...byKey.values()].filter(({ id }) => counts.get(id) === selections.length * moments.length);
}

const results = readResults();
const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

/** Of some results, the mean over tasks and lengths of the share of right answers, in %, and that of each task. */
function scoreOf(policy, moment, wanted = lengths) {
  const chosen = results.filter((each) => each.policy === policy && each.moment === moment && wanted.includes(each.length));
  const cells = groupBy(chosen, cellOf);
  const tasks = groupBy([...cells.values()], ([first]) => first.task);
  const percent = (cell) => 100 * mean(cell.map(({ right }) => Number(right)));
  const ofTasks = [...tasks.values()].map((each) => mean(each.map(percent)));
  const round = (number) => Number(number.toFixed(1));
  return {
    median: round(mean(ofTasks)),
    low: round(Math.min(...ofTasks)),
    high: round(Math.max(...ofTasks)),
    samples: chosen.length,
    kvBytes: Math.round(mean(chosen.map(({ kvBytes }) => kvBytes))),
  };
}

const cellOf = ({ task, length }) => `${task} ${length}`;

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}

function row(way, share, moment, wanted, name) {
  const { kvBytes, ...result } = scoreOf(`${way} 1/${share}`, moment, wanted);
  const { median, low, high, samples } = scoreOf(`${reference} 1/${share}`, moment, wanted);
  return {
    measure: `${way}, 1/${share} of the prompt, ${moment}, ${name}`,
    shapes: `needle-8m, ${result.samples} held-out examples of 7 tasks, tokens kept 1/${share}`,
    device: 'cpu',
    kind: 'small-model',
    unit: '% right',
    better: 'higher',
    result,
    ...(way !== reference && median > 0 && { reference: { name: `${reference} as published`, median, low, high, samples } }),
    ...(way === 'HBW' && wanted.length === 1 && moment === moments[0] && { target: { ratio: 1 } }),
    chart: moment === moments[0] && wanted.length > 1 && way !== 'streaming',
    kvBytes,
    date: stamp().date,
    machine: values.machine,
  };
}

const rows = Object.keys(ways).flatMap((way) =>
  shares.flatMap((share) => [
    ...moments.map((moment) => row(way, share, moment, lengths, '1K to 8K')),
    row(way, share, moments[0], [4096], '4K'),
    row(way, share, moments[0], [8192], '8K'),
  ]),
);
keepRows('retrieval', 'Right answers of the small model when the cache is cut down', rows);

const cell = (number, best) => (number === best ? `**${number.toFixed(1)}**` : number.toFixed(1));

/** One line a way, one column for each of `columns`: the best of each column in bold. */
function table(head, names, columns) {
  const numbers = names.map(([, policyOf]) => columns.map(([, ...column]) => policyOf(...column)));
  const best = columns.map((_, index) => Math.max(...numbers.map((line) => line[index])));
  return [
    `| ${[head, ...columns.map(([title]) => title)].join(' | ')} |`,
    `|---|${columns.map(() => '---:|').join('')}`,
    ...names.map(([name], line) => `| ${[name, ...numbers[line].map((number, index) => cell(number, best[index]))].join(' | ')} |`),
  ].join('\n');
}

function tables() {
  const names = Object.keys(ways).map((way) => [way, (share, moment, wanted) => scoreOf(`${way} 1/${share}`, moment, wanted).median]);
  const all = (moment) => table(moment, names, shares.map((share) => [`1/${share}`, share, moment, lengths]));
  const long = [4096, 8192].flatMap((length) => shares.map((share) => [`${length / 1024}K, 1/${share}`, share, moments[0], [length]]));
  const ablated = ['halo', 'halo, head shares', ...Object.keys(ablations)];
  const parts = ablated.map((name) => [name, (moment) => scoreOf(`${name} 1/8`, moment).median]);
  const dense = scoreOf('dense', moments[0]);
  const perLength = lengths.map((length) => `${scoreOf('dense', moments[0], [length]).samples} of ${length / 1024}K`);
  return [
    `Held-out examples: ${dense.samples} (${perLength.join(', ')}). With the whole cache ${dense.median} % are right.`,
    ...moments.map(all),
    table(`${moments[0]}, long`, names, long),
    table('one setting changed, 1/8', parts, moments.map((moment) => [moment, moment])),
  ].join('\n\n');
}

const text = readFileSync(page, 'utf8');
const marks = /(<!-- retrieval:begin -->\n)[^]*(<!-- retrieval:end -->)/;
writeFileSync(page, text.replace(marks, (_all, begin, end) => `${begin}${tables()}\n${end}`));
