// Makes rows of docs/benchmarks/hcattn-quality.json of the needles that were found. Of what stores.mjs wrote:
//
//   node tools/bench/retrieval/stores.mjs --settings niah-settings --texts 0 --tasks passkey --lengths 1024,2048,4096 --out raw.jsonl
//   node tools/bench/retrieval/niah-rows.mjs --machine 'name, cores' raw.jsonl
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { groupBy, mean, readResults, round } from './summaries.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const results = readResults(positionals);
const lengths = [...new Set(results.map(({ length }) => length))].sort((a, b) => a - b);
const percent = (some) => round(100 * mean(some.map(({ right }) => Number(right))), 1);

const rows = [...groupBy(results, ({ setting }) => setting)].map(([setting, own]) => {
  const ofLengths = lengths.map((length) => percent(own.filter((each) => each.length === length)));
  const ofDevice = own.filter(({ length }) => length === lengths.at(-1)).map(({ kvBytes }) => kvBytes);
  return {
    measure: `needles found, ${setting}`,
    shapes: `needle-8m, ${own.length} examples of a needle in ${lengths.map((length) => length.toLocaleString('en-US')).join(', ')} tokens`,
    ...{ device: own[0].device, kind: 'small-model', unit: '% right', better: 'higher' },
    result: { median: percent(own), low: Math.min(...ofLengths), high: Math.max(...ofLengths), samples: own.length },
    ...{ chart: false, kvBytes: Math.round(mean(ofDevice)), date: stamp().date, machine: values.machine },
  };
});
keepRows('hcattn-quality', 'Quality of the small model with caches of codes', rows);
for (const { measure, result } of rows) console.log(measure, result);
