// Reads prompts with the small model under settings of skeletonPrefill, in turns with dense attention, and measures time,
// the share of blocks that was computed, perplexity and right answers: docs/benchmarks/skeleton-cpu.json.
//
//   node tools/bench/skeleton.mjs [--threads 2] [--tokens 16384] [--rounds 3] [--texts 6] [--examples 8] [--length 4096]
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, readRetrievalExamples, readTexts, textLoss } from '../../packages/eval/dist/index.js';
import { generateTokens, Model, prefill } from '../../packages/model/dist/index.js';
import { skeletonPrefill } from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice, kvPolicy } from '../../packages/sparse-core/dist/index.js';
import { keepRows, stamp, summarise } from './results.mjs';

const { values } = parseArgs({
  options: {
    threads: { type: 'string', default: '2' },
    tokens: { type: 'string', default: '16384' },
    rounds: { type: 'string', default: '3' },
    texts: { type: 'string', default: '6' },
    // Of each task.
    examples: { type: 'string', default: '8' },
    length: { type: 'string', default: '4096' },
  },
});
const { threads, tokens, rounds, texts: textCount, examples: exampleCount, length } = Object.fromEntries(
  Object.entries(values).map(([name, value]) => [name, Number(value)]),
);

const settings = {
  dense: undefined,
  'ε = 0.1': { epsilon: 0.1 },
  'ε = 0.8': { epsilon: 0.8 },
  'budget 1/4': { budget: 1 / 4 },
  'budget 1/8': { budget: 1 / 8 },
};
const policyOf = (options) => kvPolicy(options === undefined ? {} : { prefill: skeletonPrefill(options) });

const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device: createDevice({ threads }) });
const { tokenizer } = model;
const texts = await readTexts(`${folder}/eval/ppl.jsonl.gz`);

/** Calls `measure` with a runner of each setting in turn, for each item. Settings by name, a result for each item. */
async function inTurns(items, contextTokens, measure) {
  const results = Object.fromEntries(Object.keys(settings).map((name) => [name, []]));
  for (const item of items) {
    for (const [name, options] of Object.entries(settings)) {
      const runner = model.createRunner({ policy: policyOf(options), contextTokens });
      results[name].push(await measure(runner, item));
      runner.dispose();
    }
  }
  return results;
}

/** Reads a prompt in one go. */
async function read(runner, ids) {
  const sequence = runner.openSequence();
  let density = 1;
  const start = performance.now();
  const logits = await prefill(runner, sequence, ids, { onReport: (report) => (density = report.density) });
  await logits.read();
  const milliseconds = performance.now() - start;
  logits.dispose();
  sequence.dispose();
  return { milliseconds, density };
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

const row = (measure, setting, fields) => ({
  measure: `${measure}, ${setting}`,
  shapes: { model: 'needle-8m', setting },
  device: 'cpu',
  kind: 'measured',
  better: 'lower',
  ...fields,
  ...stamp(),
});
const rows = [];

const words = await tokenizer.encode(texts.join('\n'));
const prompt = words.subarray(0, tokens);
if (prompt.length < tokens) throw new Error(`The texts have ${words.length} tokens; ${tokens} are wanted.`);
const reads = await inTurns(Array.from({ length: rounds + 1 }, () => prompt), tokens, read);
const dense = summarise(reads.dense.slice(1).map(({ milliseconds }) => milliseconds));
for (const [name, all] of Object.entries(reads)) {
  // The first round warms up.
  const timed = summarise(all.slice(1).map(({ milliseconds }) => milliseconds));
  const share = summarise(all.map(({ density }) => density * 100));
  const reference = name === 'dense' ? undefined : { name: 'dense', ...dense };
  rows.push(row(`prompt of ${tokens} tokens, ${threads} threads`, name, { unit: 'ms', result: timed, reference }));
  rows.push(row(`scores computed of a prompt of ${tokens} tokens`, name, { unit: '%', result: share, chart: false }));
}

const losses = await inTurns(await Promise.all(texts.slice(0, textCount).map((text) => tokenizer.encode(text))), 8256, textLoss);
const perplexity = (all) => {
  const sum = all.reduce((total, { crossEntropy, tokens: count }) => total + crossEntropy * count, 0);
  return Math.exp(sum / all.reduce((total, { tokens: count }) => total + count, 0));
};
for (const [name, all] of Object.entries(losses)) {
  const reference = name === 'dense' ? undefined : { name: 'dense', ...summarise([perplexity(losses.dense)]) };
  rows.push(row(`perplexity of ${all.length} texts of 8192 tokens`, name, { unit: '', result: summarise([perplexity(all)]), reference, chart: false }));
}

const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`)).filter(
  (example) => example.length === length && Number(example.id.split('-').at(-1)) < exampleCount,
);
const answers = await inTurns(await Promise.all(examples.map((example) => encodeExample(tokenizer, example))), length + 64, isRight);
const rightShare = (all) => (all.filter(Boolean).length / all.length) * 100;
for (const [name, all] of Object.entries(answers)) {
  const reference = name === 'dense' ? undefined : { name: 'dense', ...summarise([rightShare(answers.dense)]) };
  const fields = { unit: '%', better: 'higher', result: summarise([rightShare(all)]), reference, chart: false };
  rows.push(row(`right answers to ${all.length} questions behind ${length} tokens`, name, fields));
}
keepRows('skeleton-cpu', 'Sparse Skeleton: prompts of the small model on the CPU', rows);
for (const { measure, result, reference } of rows) console.log(measure, result.median, reference?.median ?? '');
model.dispose();
