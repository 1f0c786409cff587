// Asks the small model's questions with caches over two memories: how many tokens of each kv head an answer reads, and what
// blocks are scored by. A prompt is read once for all budgets, each of which answers in a fork. Writes a JSON line for each
// example and metadata; what a file holds already is not asked again. With --select answers read of the tokens that a named policy
// selects. Needs built packages; shards may run at the same time.
// budget-rows.mjs makes rows of what this wrote.
//
//   node tools/bench/retrieval/budgets.mjs --out raw.jsonl [--metadata cuboidMean,mean,minMax] [--budgets 512,1024,1536,2048]
//     [--select hbw-1/4] [--threads 1] [--shard 0/4] [--lengths 4096,8192] [--examples 40] [--seconds 3600]
import { appendFileSync, existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, evaluateBudgets, readRetrievalExamples } from '../../../packages/eval/dist/index.js';
import { hierarchicalStore } from '../../../packages/hierarchical-kv/dist/index.js';
import { Model } from '../../../packages/model/dist/index.js';
import { policies } from '../../../packages/policies/dist/index.js';
import { createDevice, kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    metadata: { type: 'string', default: 'cuboidMean,mean,minMax' },
    budgets: { type: 'string', default: '512,1024,1536,2048' },
    select: { type: 'string' },
    threads: { type: 'string', default: '1' },
    shard: { type: 'string', default: '0/1' },
    lengths: { type: 'string', default: '4096,8192' },
    // Of each task and length.
    examples: { type: 'string', default: '40' },
    // No example is begun later.
    seconds: { type: 'string', default: '86400' },
  },
});
const numbers = (list) => list.split(',').map(Number);
const lengths = numbers(values.lengths);
const contextTokens = Math.max(...lengths) + 64;
// The whole context is the dense cache, or all that was selected.
const budgets = [contextTokens, ...numbers(values.budgets)];
const [shard, shards] = values.shard.split('/').map(Number);
const end = performance.now() + 1000 * Number(values.seconds);
const numberOf = ({ id }) => Number(id.split('-').at(-1));

const known = existsSync(values.out) ? readFileSync(values.out, 'utf8').split('\n').filter((line) => line.endsWith('}')) : [];
const keyOf = ({ metadata, select, id }) => `${metadata} ${select} ${id}`;
const done = new Set(known.map((line) => keyOf(JSON.parse(line))));

const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device: createDevice({ threads: Number(values.threads) }) });

const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`))
  .filter((example) => lengths.includes(example.length) && numberOf(example) < Number(values.examples))
  // An example of every task and length before the next: a run that is cut short is still balanced.
  .sort((one, other) => numberOf(one) - numberOf(other) || one.length - other.length)
  .filter((_, index) => index % shards === shard);

const { select } = values;
for (const metadata of values.metadata.split(',')) {
  const store = hierarchicalStore({ deviceBytes: Number.MAX_SAFE_INTEGER, budgetTokens: contextTokens, metadata });
  const runner = model.createRunner({ policy: kvPolicy({ store, select: policies.find(({ name }) => name === select)?.select() }), contextTokens, sequences: budgets.length + 1 });
  for (const example of examples) {
    const { id, task, length } = example;
    if (done.has(keyOf({ metadata, select, id })) || performance.now() > end) continue;
    for (const { budgetTokens, right } of await evaluateBudgets(runner, await encodeExample(model.tokenizer, example), budgets)) {
      const budget = budgetTokens === contextTokens ? 'dense' : budgetTokens;
      appendFileSync(values.out, `${JSON.stringify({ metadata, select, budget, id, task, length, right })}\n`);
    }
  }
  runner.dispose();
}
model.dispose();
