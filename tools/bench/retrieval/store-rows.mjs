// Makes rows of what stores.mjs wrote, and the tables of docs/methods/hierasparse.md.
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
  const lines = positionals.flatMap((file) => readFileSync(file, 'utf8').split('\n').filter(Boolean));
  const all = lines.map((line) => JSON.parse(line));
  return [...groupBy(all, ({ item }) => item).values()].filter(({ length }) => length === settings.length).flat();
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const mean = (numbers) => sum(numbers) / numbers.length;
const round = (number, digits) => Number(number.toFixed(digits));

/** The mean of a sample and its standard error. */
function estimate(numbers) {
  const middle = mean(numbers);
  const variance = sum(numbers.map((number) => (number - middle) ** 2)) / (numbers.length - 1);
  return { mean: middle, error: Math.sqrt(variance / numbers.length), samples: numbers.length };
}

/** The share of right answers in %, and its standard error: the mean over strata, each as large as another. */
function percentOf(answers, stratumOf) {
  const strata = [...groupBy(answers, stratumOf).values()].map((some) =>
    estimate(some.map(({ right }) => 100 * Number(right))),
  );
  return {
    mean: mean(strata.map((stratum) => stratum.mean)),
    error: Math.sqrt(sum(strata.map(({ error }) => error ** 2))) / strata.length,
    samples: answers.length,
  };
}

const results = readResults();
const [asked, texts] = [({ right }) => right !== undefined, ({ tokens }) => tokens].map((wanted) => results.filter(wanted));
const tasks = [...new Set(asked.map(({ task }) => task))].sort();
const lengths = [...new Set(asked.map(({ length }) => length))].sort((a, b) => a - b);
const cellOf = ({ task, length }) => `${task} ${length}`;
const [{ device }] = results;

/** How much less likely a setting makes each text than the dense cache, in nats a token. */
function lossesBeyondDense(name) {
  const ofSetting = (wanted) => texts.filter(({ setting }) => setting === wanted);
  const dense = new Map(ofSetting('dense').map(({ item, crossEntropy }) => [item, crossEntropy]));
  return ofSetting(name).map(({ item, crossEntropy }) => crossEntropy - dense.get(item));
}

function scoreOf(name) {
  const own = asked.filter(({ setting }) => setting === name);
  const losses = texts.filter(({ setting }) => setting === name).map(({ crossEntropy }) => crossEntropy);
  const longest = own.filter(({ length }) => length === lengths.at(-1));
  return {
    all: percentOf(own, cellOf),
    ofTasks: tasks.map((task) => percentOf(own.filter((each) => each.task === task), cellOf)),
    ofLengths: lengths.map((length) => percentOf(own.filter((each) => each.length === length), cellOf)),
    loss: estimate(losses),
    perplexities: losses.map(Math.exp),
    beyondDense: estimate(lossesBeyondDense(name)),
    kvBytes: Math.round(mean(longest.map(({ kvBytes }) => kvBytes))),
  };
}

const scores = settings.map((setting) => ({ ...setting, ...scoreOf(setting.name) }));
const [dense] = scores;
const tokensOf = (length) => length.toLocaleString('en-US');

/** The figures of a row: over the tasks, and over the texts. */
const ofAnswers = ({ all, ofTasks }) => ({
  median: round(all.mean, 1),
  low: round(Math.min(...ofTasks.map((task) => task.mean)), 1),
  high: round(Math.max(...ofTasks.map((task) => task.mean)), 1),
  samples: all.samples,
});
const ofTexts = ({ loss, perplexities }) => ({
  median: round(Math.exp(loss.mean), 4),
  low: round(Math.min(...perplexities), 4),
  high: round(Math.max(...perplexities), 4),
  samples: loss.samples,
});

const rows = scores.flatMap((score) => {
  const { name, prompt, after, kvBytes } = score;
  const caches = name === 'dense' ? 'dense' : `prompts ${prompt}, then ${after}`;
  const row = (measure, shapes, unit, better, figures, standardError) => ({
    measure: `${measure}, ${caches}`,
    shapes: `needle-8m, ${shapes}`,
    device,
    kind: 'small-model',
    unit,
    better,
    result: figures(score),
    ...(name !== 'dense' && { reference: { name: 'dense cache', ...figures(dense) } }),
    chart: false,
    standardError,
    kvBytes,
    date: stamp().date,
    machine: values.machine,
  });
  const examples = `${score.all.samples} examples of ${tasks.length} tasks of ${lengths.map(tokensOf).join(' and ')} tokens`;
  const ofHalves = `second half of ${score.loss.samples} texts of 8,192 tokens`;
  return [
    row('right answers', examples, '% right', 'higher', ofAnswers, round(score.all.error, 2)),
    row('perplexity', ofHalves, 'perplexity', 'lower', ofTexts, round(Math.exp(score.loss.mean) * score.loss.error, 4)),
  ];
});
keepRows('hierasparse-quality', 'Quality of the small model with sparse caches', rows);

const percent = ({ mean, error }, digits) =>
  error === 0 ? mean.toFixed(0) : `${mean.toFixed(digits)} ± ${error.toFixed(1)}`;
const megabytes = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;

/** How much larger the perplexity is than with the dense cache. */
function increase({ mean, error }) {
  const [more, spread] = [Math.expm1(mean), Math.exp(mean) * error].map((share) => (100 * share).toFixed(1));
  return `+${more} ± ${spread} %`;
}

function table(head, cells) {
  return [
    `| prompts | after them | ${head.join(' | ')} |`,
    `|---|---|${'---:|'.repeat(head.length)}`,
    ...scores.map((score) => `| ${[score.prompt, score.after, ...cells(score)].join(' | ')} |`),
  ].join('\n');
}

function tables() {
  const counts = dense.ofTasks.map(({ samples }) => samples);
  const [fewest, most] = [Math.min(...counts), Math.max(...counts)];
  const summary = [...lengths.map((length) => `${tokensOf(length)} tokens`), 'all', `KV bytes at ${tokensOf(lengths.at(-1))}`];
  return [
    `${dense.all.samples} examples of ${tasks.length} tasks, each of which counts the same, and ${dense.loss.samples} ` +
      'texts. Behind ± stands the standard error; that of the perplexity is of its ratio to the dense one, text by text.',
    table([...summary, 'perplexity', 'beyond dense'], ({ name, ofLengths, all, kvBytes, loss, beyondDense }) => [
      ...[...ofLengths, all].map((share) => percent(share, 1)),
      megabytes(kvBytes),
      Math.exp(loss.mean).toFixed(3),
      name === 'dense' ? '' : increase(beyondDense),
    ]),
    `By task, ${fewest === most ? most : `${fewest} to ${most}`} examples a cell; where all are right, as many as ` +
      `${(100 * (1 - 0.05 ** (1 / fewest))).toFixed(1)} % of all such may be wrong (95 % confidence):`,
    table(tasks, ({ ofTasks }) => ofTasks.map((share) => percent(share, 0))),
  ].join('\n\n');
}

const text = readFileSync(page, 'utf8');
const marks = /(<!-- quality:begin -->\n)[^]*(<!-- quality:end -->)/;
writeFileSync(page, text.replace(marks, (_all, begin, end) => `${begin}${tables()}\n${end}`));
