// Right answers and perplexity of the small model with each sparsity of a HieraSparse cache, as a table. Needs built
// packages; about ten minutes on two cores.
//
//   node tools/bench/retrieval/stores.mjs [--examples 5] [--lengths 4096] [--texts 8]
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import {
  encodeExample,
  evaluateRetrieval,
  readRetrievalExamples,
  readTexts,
  textLoss,
} from '../../../packages/eval/dist/index.js';
import { hieraSparsePrefill, hieraSparseStore } from '../../../packages/hierasparse/dist/index.js';
import { Model } from '../../../packages/model/dist/index.js';
import { kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const { values } = parseArgs({
  options: {
    examples: { type: 'string', default: '5' },
    lengths: { type: 'string', default: '4096' },
    texts: { type: 'string', default: '8' },
  },
});
const settings = {
  dense: undefined,
  'S_V = 1': { values: 1 },
  'S_K = 1': { keys: 1 },
  'S_K = S_V = 0.5': { keys: 0.5, values: 0.5 },
  'S_K = S_V = 1': { keys: 1, values: 1 },
};
const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const lengths = values.lengths.split(',').map(Number);
const chosen = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`)).filter(
  ({ id, length }) => lengths.includes(length) && Number(id.split('-').at(-1)) < Number(values.examples),
);
const texts = (await readTexts(`${folder}/eval/ppl.jsonl.gz`)).slice(0, Number(values.texts));
const tasks = [...new Set(chosen.map(({ task }) => task))];

const model = await Model.open(folder);
const examples = [];
for (const example of chosen) examples.push(await encodeExample(model.tokenizer, example));

console.log(`${examples.length} examples of ${values.lengths} tokens; ${texts.length} texts, half of 8,192 tokens read first\n`);
console.log(`| cache | ${tasks.join(' | ')} | all | KV bytes | perplexity |`);
console.log(`|---|${'---:|'.repeat(tasks.length + 3)}`);
for (const [name, sparsity] of Object.entries(settings)) {
  const policy = kvPolicy(sparsity && { prefill: hieraSparsePrefill({}), store: hieraSparseStore(sparsity) });
  const runner = model.createRunner({ policy, sequences: 3, contextTokens: 8256 });
  const results = [];
  for (const example of examples) {
    const whole = [{ name, select: () => undefined }];
    results.push(...(await evaluateRetrieval(runner, example, whole, { moments: ['question-aware'] })));
  }
  const losses = [];
  for (const text of texts) {
    const ids = await model.tokenizer.encode(text);
    losses.push((await textLoss(runner, ids, { contextTokens: ids.length / 2 })).crossEntropy);
  }
  runner.dispose();
  const share = (some) => ((100 * some.filter(({ right }) => right).length) / some.length).toFixed(0);
  const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
  const cells = [
    ...tasks.map((task) => share(results.filter((each) => each.task === task))),
    share(results),
    (mean(results.map(({ kvBytes }) => kvBytes)) / 2 ** 20).toFixed(1) + ' MiB',
    Math.exp(mean(losses)).toFixed(3),
  ];
  console.log(`| ${[name, ...cells].join(' | ')} |`);
}
model.dispose();
