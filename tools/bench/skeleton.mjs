// Reads prompts with the small model under every preset of @kv/skeleton-prefill, in turns with dense attention, and
// measures time, the share of blocks that was computed, perplexity and right answers: docs/benchmarks/skeleton-cpu.json.
// Presets are compared at equal shares: the epsilon of each is searched on the first item of a measure.
//
//   node tools/bench/skeleton.mjs [--measures time,perplexity,answers] [--threads 2] [--tokens 16384] [--rounds 3]
//     [--texts 4] [--first-text 1] [--examples 6] [--lengths 4096,8192]
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, readRetrievalExamples, readTexts, textLoss } from '../../packages/eval/dist/index.js';
import { generateTokens, Model, prefill } from '../../packages/model/dist/index.js';
import {
  antidiagonalPrefill,
  clusteredPrefill,
  pooledPrefill,
  skeletonPrefill,
  streamingPrefill,
  verticalSlashPrefill,
} from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice, densePrefill, kvPolicy } from '../../packages/sparse-core/dist/index.js';
import { keepRows, stamp, summarise } from './results.mjs';

const { values } = parseArgs({
  options: {
    measures: { type: 'string', default: 'time,perplexity,answers' },
    threads: { type: 'string', default: '2' },
    tokens: { type: 'string', default: '16384' },
    rounds: { type: 'string', default: '3' },
    texts: { type: 'string', default: '4' },
    'first-text': { type: 'string', default: '1' },
    // Of each task.
    examples: { type: 'string', default: '6' },
    lengths: { type: 'string', default: '4096,8192' },
  },
});
const [threads, tokens, rounds] = [values.threads, values.tokens, values.rounds].map(Number);
const [textCount, exampleCount] = [values.texts, values.examples].map(Number);
const firstText = Number(values['first-text']);
const measures = values.measures.split(',');

/** Presets that take an epsilon. */
const estimating = {
  skeleton: skeletonPrefill,
  clustered: clusteredPrefill,
  pooled: pooledPrefill,
  antidiagonal: antidiagonalPrefill,
  'vertical-slash': verticalSlashPrefill,
};
/** As published. */
const published = {
  'ε = 0.1': skeletonPrefill({ epsilon: 0.1 }),
  'ε = 0.8': skeletonPrefill({ epsilon: 0.8 }),
  'budget 1/4': skeletonPrefill({ budget: 1 / 4 }),
  'budget 1/8': skeletonPrefill({ budget: 1 / 8 }),
  'antidiagonal, mass 0.9': antidiagonalPrefill({ mass: 0.9 }),
  'pooled, 0.1 of the best block': pooledPrefill({ ofMax: 0.1 }),
};

const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device: createDevice({ threads }) });
const { tokenizer } = model;
const texts = await readTexts(`${folder}/eval/ppl.jsonl.gz`);

/** Calls `measure` with a runner under a prefill: its result, and the share of causal scores that was computed, in percent. */
async function under(method, contextTokens, item, measure) {
  const reports = [];
  const prefill = {
    ...method,
    attend(stream, call) {
      const attended = method.attend(stream, call);
      const scores = call.batch.entries.reduce((sum, { position, rows }) => sum + rows * (position + rows / 2), 0);
      reports.push(Promise.resolve(attended.report).then(({ density }) => ({ scores, computed: scores * density })));
      return attended;
    },
  };
  const runner = model.createRunner({ policy: kvPolicy({ prefill }), contextTokens });
  try {
    const result = await measure(runner, item);
    const all = await Promise.all(reports);
    const sum = (field) => all.reduce((total, report) => total + report[field], 0);
    return { result, share: (sum('computed') / sum('scores')) * 100 };
  } finally {
    runner.dispose();
  }
}

/** A preset with the epsilon that computes this share of an item, as nearly as it can. */
async function atShare(preset, share, shareOf) {
  let [low, high] = [Math.log(1e-4), Math.log(100)];
  for (let step = 0; step < 10; step++) {
    const middle = (low + high) / 2;
    const given = (await shareOf(preset({ epsilon: Math.exp(middle) }))) / 100;
    if (Math.abs(given / share - 1) < 0.01) return preset({ epsilon: Math.exp(middle) });
    if (given > share) low = middle;
    else high = middle;
  }
  return preset({ epsilon: Math.exp(high) });
}

/** What is measured under each setting in turn, for each item: `{ result, share }` for each item, by the setting's name. */
async function inTurns(items, contextTokens, shares, measure, others = {}) {
  const settings = { dense: densePrefill(), ...published, ...others };
  for (const share of shares) {
    const shareOf = async (method) => (await under(method, contextTokens, items[0], measure)).share;
    for (const [name, preset] of Object.entries(estimating)) {
      settings[`${name} at 1/${1 / share}`] = await atShare(preset, share, shareOf);
    }
    settings[`streaming at 1/${1 / share}`] = streamingPrefill({ budget: share });
  }
  const results = Object.fromEntries(Object.keys(settings).map((name) => [name, []]));
  for (const item of items) {
    for (const [name, method] of Object.entries(settings)) results[name].push(await under(method, contextTokens, item, measure));
  }
  return results;
}

const rows = [];
/** What our own preset is to reach, beside dense attention. */
const targets = {
  'prompt of 16384 tokens, 2 threads, clustered at 1/10': { ratio: 3 },
  'attention and its estimate of a prompt of 16384 tokens, 2 threads, clustered at 1/10': { ratio: 5.5 },
};

/** Adds the rows of one measure: its value under each setting, and what was computed for it. */
function keep(measure, computed, unit, better, results, valueOf) {
  const dense = valueOf(results.dense);
  for (const [setting, all] of Object.entries(results)) {
    const common = { shapes: { model: 'needle-8m', setting }, device: 'cpu', kind: 'measured', ...stamp() };
    const reference = setting === 'dense' ? undefined : { name: 'dense', ...dense };
    const share = summarise(all.map((each) => each.share));
    const target = targets[`${measure}, ${setting}`];
    rows.push({ measure: `${measure}, ${setting}`, ...(target && { target }), ...common, better, unit, result: valueOf(all), reference, chart: unit === 'ms' });
    rows.push({ measure: `${computed}, ${setting}`, ...common, better: 'lower', unit: '%', result: share, chart: false });
    console.log(measure, setting, share.median.toFixed(1), '%', rows.at(-2).result.median);
  }
}

if (measures.includes('time')) {
  const words = await tokenizer.encode(texts.join('\n'));
  const prompt = words.subarray(0, tokens);
  if (prompt.length < tokens) throw new Error(`The texts have ${words.length} tokens; ${tokens} are wanted.`);
  const results = await inTurns(Array.from({ length: rounds + 1 }, () => prompt), tokens, [1 / 10], async (runner, ids) => {
    const sequence = runner.openSequence();
    const start = performance.now();
    const logits = await prefill(runner, sequence, ids);
    await logits.read();
    const milliseconds = performance.now() - start;
    logits.dispose();
    sequence.dispose();
    return milliseconds;
  }, { 'no attention': { name: 'none', attend: () => ({ report: { density: 0 } }) } });
  const { 'no attention': rest, ...timed } = results;
  // The first round warms up.
  const times = (all) => summarise(all.slice(1).map(({ result }) => result));
  const others = times(rest).median;
  const attention = (all) => summarise(all.slice(1).map(({ result }) => result - others));
  keep(`prompt of ${tokens} tokens, ${threads} threads`, `scores computed of a prompt of ${tokens} tokens`, 'ms', 'lower', timed, times);
  keep(`attention and its estimate of a prompt of ${tokens} tokens, ${threads} threads`, `scores computed of a prompt of ${tokens} tokens`, 'ms', 'lower', timed, attention);
}

if (measures.includes('perplexity')) {
  const items = await Promise.all(texts.slice(firstText - 1, firstText - 1 + textCount).map((text) => tokenizer.encode(text)));
  const results = await inTurns(items, 8256, [1 / 4, 1 / 8], textLoss);
  const perplexity = (all) => {
    const sum = all.reduce((total, { result }) => total + result.crossEntropy * result.tokens, 0);
    return summarise([Math.exp(sum / all.reduce((total, { result }) => total + result.tokens, 0))]);
  };
  const of = `of ${textCount} ${firstText === 1 ? '' : 'other '}texts of 8192 tokens`;
  keep(`perplexity ${of}`, `scores computed ${of}`, '', 'lower', results, perplexity);
}

/** Whether greedy decoding gives the whole answer. */
async function isRight(runner, { prompt, answer }) {
  let count = 0;
  for await (const { id } of generateTokens(runner, prompt, { maxTokens: answer.length, endIds: [] })) {
    if (id !== answer[count]) break;
    count += 1;
  }
  return count === answer.length;
}

if (measures.includes('answers')) {
  const all = await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`);
  for (const length of values.lengths.split(',').map(Number)) {
    const examples = all.filter((each) => each.length === length && Number(each.id.split('-').at(-1)) < exampleCount);
    const items = await Promise.all(examples.map((example) => encodeExample(tokenizer, example)));
    const results = await inTurns(items, length + 64, [1 / 4, 1 / 8], isRight);
    const right = (each) => summarise([(each.filter(({ result }) => result).length / each.length) * 100]);
    const of = `${items.length} questions behind ${length} tokens`;
    keep(`right answers to ${of}`, `scores computed for ${of}`, '%', 'higher', results, right);
  }
}

keepRows('skeleton-cpu', 'Prompts of the small model over some of their blocks on the CPU', rows);
model.dispose();
