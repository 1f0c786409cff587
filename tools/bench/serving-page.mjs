// Writes the simulated tables of docs/methods/serve-simulator.md, between its marks `<!-- simulated:NAME:begin -->` and `:end`.
//
//   node tools/bench/serving-page.mjs
//
// Needs built packages. Nothing is measured here: the same sources give the same tables on any machine.
import { readFileSync, writeFileSync } from 'node:fs';
import { simulateFigures } from '@kv/serve-scheduler';

const page = new URL('../../docs/methods/serve-simulator.md', import.meta.url);

/** Four digits that say something. */
const shown = (value) => (typeof value === 'string' ? value : Number(Number(value).toPrecision(Math.abs(value) < 1000 ? 3 : 4)).toLocaleString('en-US', { maximumFractionDigits: 3 }));
const tableOf = (head, rows, left = 0) =>
  [`| ${head.join(' | ')} |`, `|${head.map((_, index) => (index < left ? '---' : '---:')).join('|')}|`, ...rows.map((row) => `| ${row.map(shown).join(' | ')} |`)].join('\n');

const figures = Object.fromEntries((await simulateFigures(['1', '10', '11', '12', '13', '15', '16a', '16b'], { model: 'lwm-7b' })).map(({ figure, rows }) => [figure, rows]));
const [, second] = await simulateFigures(['10', '13'], { model: 'lwm-7b', seed: 2 });

const named = ['base', '+SA', 'all'];
const ofSystems = (figure, line) => [1, 2, 4].map((column) => figures[figure][line][column]);
const rates = tableOf(
  ['requests/s', ...['first token, ms', 'tokens/s', 'between tokens, ms'].flatMap((what) => named.map((name, index) => (index === 0 ? `${what}: ${name}` : name)))],
  figures['10'].map(([rate], line) => [rate, ...['10', '11', '12'].flatMap((figure) => ofSystems(figure, line))]),
);
const ratio = (value) => (Number.isFinite(value) ? value.toFixed(2) : '');
const goodput = tableOf(
  ['', ...figures['13'].map(([system]) => system)],
  [
    ['requests/s', ...figures['13'].map(([, rate]) => rate)],
    ['times the one before', ...figures['13'].map(([, , times]) => ratio(times))],
    ['times the one before, seed 2', ...second.rows.map(([, , times]) => ratio(times))],
    ['requests/s where the wait is 0.67 s at most', ...figures['13'].map(([, , , rate]) => rate)],
    ['times the one before', ...figures['13'].map(([, , , , times]) => ratio(times))],
  ],
  1,
);
const control = tableOf(
  ['requests/s', 'tokens/s without', 'with', 'loads a step without', 'with', 'chunks', 'segments'],
  figures['15'].map((row, line) => [...row, ...figures['16a'][line].slice(1)]),
);
const transposed = (head, rows) => tableOf([head[0], ...rows.map(([first]) => shown(first))], head.slice(1).map((name, index) => [name, ...rows.map((row) => row[index + 1])]), 1);
const batch = transposed(['answers in a step', 'tokens/s', 'loads a step'], figures['1']);
const chunks = transposed(['tokens of a chunk', 'chunks', 'layer segments'], figures['16b'].map(([tokens, ...times]) => [tokens, ...times.map((each) => each.toFixed(3))]));

let text = readFileSync(page, 'utf8');
for (const [name, table] of Object.entries({ rates, goodput, control, batch, chunks })) {
  const marks = new RegExp(`(<!-- simulated:${name}:begin -->\\n)[^]*(<!-- simulated:${name}:end -->)`);
  if (!marks.test(text)) throw new Error(`the page has no marks of ${name}`);
  text = text.replace(marks, (_all, begin, end) => `${begin}${table}\n${end}`);
}
writeFileSync(page, text);
