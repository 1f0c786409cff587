// Puts rows that were printed on another machine, one a line, into docs/benchmarks.
//
//   node tools/bench/keep.mjs model-h200 rows.jsonl [--title 'of a new file']
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { keepRows, RESULTS_FOLDER } from './results.mjs';

const { values, positionals } = parseArgs({ options: { title: { type: 'string' } }, allowPositionals: true });
const [name, file] = positionals;
const title = values.title ?? JSON.parse(readFileSync(`${RESULTS_FOLDER}${name}.json`, 'utf8')).title;
const lines = readFileSync(file, 'utf8').split('\n').filter(Boolean);
keepRows(name, title, lines.map((line) => JSON.parse(line)));
