// Makes rows of docs/benchmarks/hcattn-quality.json, and the tables of docs/methods/hcattn-quality.md, of what stores.mjs wrote
// with --settings codec-settings, and llama-caches.mjs of the same examples. With --rows-only the page and the rows of the dense
// cache stay as they are: so for hcattn-settings, of fewer examples.
//
//   node tools/bench/retrieval/codec-rows.mjs --machine 'name, cores' ours.jsonl llama.jsonl
import { readFileSync, writeFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { keepRows, stamp } from '../results.mjs';
import { answerFigures, estimate, groupBy, mean, ofCommonItems, percentOf, readResults, round } from './summaries.mjs';

const { values, positionals } = parseArgs({ options: { machine: { type: 'string' }, 'rows-only': { type: 'boolean' } }, allowPositionals: true });
const page = new URL('../../../docs/methods/hcattn-quality.md', import.meta.url);
const results = readResults(positionals);

/** The results of the items that every cache has which has any. */
const commonOf = (some) => ofCommonItems(some, [...new Set(some.map(({ setting }) => setting))]);

const examples = commonOf(results.filter(({ task }) => task !== undefined));
const texts = commonOf(results.filter(({ tokens }) => tokens !== undefined));
const lengths = [...new Set(examples.map(({ length }) => length))].sort((a, b) => a - b);
const tasks = [...new Set(examples.map(({ task }) => task))].sort();
const tokensOf = lengths.map((length) => length.toLocaleString('en-US')).join(' and ');
const longest = lengths.at(-1).toLocaleString('en-US');

const scores = [...groupBy(examples, ({ setting }) => setting)].map(([name, own]) => {
  // A selection is made at the end of a prompt, which a text does not have.
  const losses = texts.filter(({ setting }) => setting === name && !/^(halo|hbw)/.test(name));
  const dense = new Map(texts.filter(({ setting }) => setting === 'dense').map(({ item, crossEntropy }) => [item, crossEntropy]));
  const perplexities = losses.map(({ crossEntropy }) => Math.exp(crossEntropy));
  return {
    name,
    all: percentOf(own),
    ofTasks: tasks.map((task) => percentOf(own.filter((each) => each.task === task))),
    kvBytes: Math.round(mean(own.filter(({ length }) => length === lengths.at(-1)).map(({ kvBytes }) => kvBytes))),
    ...(losses.length > 0 && {
      beyondDense: estimate(losses.map(({ item, crossEntropy }) => crossEntropy - dense.get(item))),
      perplexity: {
        median: round(Math.exp(mean(losses.map(({ crossEntropy }) => crossEntropy))), 4),
        ...{ low: round(Math.min(...perplexities), 4), high: round(Math.max(...perplexities), 4), samples: losses.length },
      },
    }),
  };
});
const dense = scores.find(({ name }) => name === 'dense');
const answers = ({ all, ofTasks }) => answerFigures(all, ofTasks);

const rows = scores.filter(({ name }) => !values['rows-only'] || name !== 'dense').flatMap((score) => {
  const { name, all, kvBytes, perplexity, beyondDense } = score;
  const row = (measure, shapes, unit, better, figures, standardError) => ({
    ...{ measure: `${measure}, ${name}`, shapes: `needle-8m, ${shapes}`, device: results[0].device, kind: 'small-model', unit, better },
    result: figures(score),
    ...(name !== 'dense' && { reference: { name: 'dense', ...figures(dense) } }),
    ...(Number.isFinite(standardError) && { standardError }),
    ...{ chart: false, kvBytes, date: stamp().date, machine: values.machine },
  });
  const asked = `${all.samples} examples of ${tasks.length} tasks of ${tokensOf} tokens`;
  const ofAnswers = row(lengths.length > 1 ? 'right answers' : `right answers to ${tokensOf} tokens`, asked, '% right', 'higher', answers, round(all.error, 2));
  if (perplexity === undefined) return [ofAnswers];
  const halves = `second half of ${perplexity.samples} texts of 8,192 tokens`;
  const error = round(perplexity.median * beyondDense.error, 4);
  return [ofAnswers, row('perplexity', halves, 'perplexity', 'lower', (each) => each.perplexity, error)];
});
keepRows('hcattn-quality', 'Quality of the small model with caches of codes', rows);

if (values['rows-only']) process.exit();

const percent = ({ mean: share, error }, digits) => (error === 0 ? share.toFixed(0) : `${share.toFixed(digits)} ± ${error.toFixed(1)}`);

/** How much larger the perplexity is than with the dense cache. */
function increase({ name, beyondDense }) {
  if (beyondDense === undefined || name === 'dense') return '';
  const [more, spread] = [Math.expm1(beyondDense.mean), Math.exp(beyondDense.mean) * beyondDense.error];
  return `${more < 0 ? '−' : '+'}${(100 * Math.abs(more)).toFixed(2)} ± ${(100 * spread).toFixed(2)} %`;
}

const table = (head, cells) =>
  [`| cache | ${head.join(' | ')} |`, `|---|${'---:|'.repeat(head.length)}`, ...scores.map((score) => `| ${[score.name, ...cells(score)].join(' | ')} |`)].join('\n');
const note =
  `${dense.all.samples} examples of ${tokensOf} tokens, of which each task and length counts the same, and ` +
  `${dense.perplexity.samples} texts. Where all are right, as many as ${(100 * (1 - 0.05 ** (1 / dense.all.samples))).toFixed(1)} % of ` +
  'all such may be wrong (95 % confidence). Behind ± stands the standard error; that of the perplexity is of its ratio to the dense ' +
  'one, text by text.';
const summary = table(['right answers', `bytes at ${longest} tokens`, 'perplexity beyond dense'], (score) => [
  percent(score.all, 1),
  `${(score.kvBytes / 2 ** 20).toFixed(1)} MiB`,
  increase(score),
]);
const byTask = table(tasks, ({ ofTasks }) => ofTasks.map((share) => percent(share, 0)));
const text = readFileSync(page, 'utf8');
const marks = /(<!-- quality:begin -->\n)[^]*(<!-- quality:end -->)/;
writeFileSync(page, text.replace(marks, (_all, begin, end) => `${begin}${note}\n\n${summary}\n\nBy task:\n\n${byTask}\n${end}`));
