// Makes rows of what stores.mjs wrote, and the tables of docs/methods/hierasparse.md.
//
//   node tools/bench/retrieval/store-rows.mjs --machine 'name, cores' raw.jsonl
import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { settings } from './store-settings.mjs';
import { answerFigures, estimate, mean, ofCommonItems, percentOf, readResults, round } from './summaries.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' } }, allowPositionals: true });
const page = new URL('../../../docs/methods/hierasparse.md', import.meta.url);

const results = ofCommonItems(readResults(positionals), settings.map(({ name }) => name));
const [asked, texts] = [({ right }) => right !== undefined, ({ tokens }) => tokens].map((wanted) => results.filter(wanted));
const tasks = [...new Set(asked.map(({ task }) => task))].sort();
const lengths = [...new Set(asked.map(({ length }) => length))].sort((a, b) => a - b);
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
    all: percentOf(own),
    ofTasks: tasks.map((task) => percentOf(own.filter((each) => each.task === task))),
    ofLengths: lengths.map((length) => percentOf(own.filter((each) => each.length === length))),
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
const ofAnswers = ({ all, ofTasks }) => answerFigures(all, ofTasks);
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
