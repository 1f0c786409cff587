// Makes rows of what stores.mjs wrote, and the table of docs/methods/hierasparse.md.
//
//   node tools/bench/retrieval/store-rows.mjs --machine 'name, cores' raw.jsonl
import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { settings } from './store-settings.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const page = new URL('../../../docs/methods/hierasparse.md', import.meta.url);

/** The results of the items that were measured under every setting. */
function readResults() {
  const lines = positionals.flatMap((file) => readFileSync(file, 'utf8').trimEnd().split('\n'));
  const all = lines.map((line) => JSON.parse(line));
  return all.filter(({ item }) => all.filter((other) => other.item === item).length === settings.length);
}

const results = readResults();
const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
const round = (number, digits) => Number(number.toFixed(digits));

function scoreOf(name) {
  const own = results.filter(({ setting }) => setting === name);
  const [asked, texts] = [own.filter(({ right }) => right !== undefined), own.filter(({ tokens }) => tokens)];
  const percent = (some) => 100 * mean(some.map(({ right }) => Number(right)));
  const tasks = [...new Set(asked.map(({ task }) => task))];
  const ofTasks = new Map(tasks.map((name) => [name, percent(asked.filter(({ task }) => task === name))]));
  const perplexities = texts.map(({ crossEntropy }) => Math.exp(crossEntropy));
  return {
    ofTasks,
    right: {
      median: round(mean([...ofTasks.values()]), 1),
      low: round(Math.min(...ofTasks.values()), 1),
      high: round(Math.max(...ofTasks.values()), 1),
      samples: asked.length,
    },
    perplexity: {
      median: round(Math.exp(mean(texts.map(({ crossEntropy }) => crossEntropy))), 4),
      low: round(Math.min(...perplexities), 4),
      high: round(Math.max(...perplexities), 4),
      samples: texts.length,
    },
    kvBytes: Math.round(mean(asked.map(({ kvBytes }) => kvBytes))),
  };
}

const scores = settings.map((setting) => ({ ...setting, ...scoreOf(setting.name) }));
const [dense] = scores;

const rows = scores.flatMap(({ name, prompt, after, right, perplexity, kvBytes }) => {
  const caches = name === 'dense' ? 'dense' : `prompts ${prompt}, then ${after}`;
  const row = (measure, shapes, unit, better, result, reference) => ({
    measure: `${measure}, ${caches}`,
    shapes: `needle-8m, ${shapes}`,
    device: 'cpu',
    kind: 'small-model',
    unit,
    better,
    result,
    ...(name !== 'dense' && { reference: { name: 'dense cache', ...reference } }),
    chart: false,
    kvBytes,
    date: stamp().date,
    machine: values.machine,
  });
  const examples = `${right.samples} examples of 7 tasks of 4,096 tokens`;
  const texts = `second half of ${perplexity.samples} texts of 8,192 tokens`;
  return [
    row('right answers', examples, '% right', 'higher', right, dense.right),
    row('perplexity', texts, 'perplexity', 'lower', perplexity, dense.perplexity),
  ];
});
keepRows('hierasparse-quality', 'Quality of the small model with sparse caches', rows);

function table() {
  const tasks = [...dense.ofTasks.keys()];
  return [
    `${dense.right.samples} examples, perplexity of ${dense.perplexity.samples} of the texts:`,
    '',
    `| prompts | after them | ${tasks.join(' | ')} | all | KV bytes | perplexity |`,
    `|---|---|${'---:|'.repeat(tasks.length + 3)}`,
    ...scores.map(({ prompt, after, ofTasks, right, perplexity, kvBytes }) => {
      const cells = [
        ...[...ofTasks.values(), right.median].map((percent) => percent.toFixed(0)),
        `${(kvBytes / 2 ** 20).toFixed(1)} MiB`,
        perplexity.median.toFixed(3),
      ];
      return `| ${[prompt, after, ...cells].join(' | ')} |`;
    }),
  ].join('\n');
}

const text = readFileSync(page, 'utf8');
const marks = /(<!-- quality:begin -->\n)[^]*(<!-- quality:end -->)/;
writeFileSync(page, text.replace(marks, (_all, begin, end) => `${begin}${table()}\n${end}`));
