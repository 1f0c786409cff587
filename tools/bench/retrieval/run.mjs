// Asks the small model's held-out questions under every selection and writes a JSON line for each result. Needs built
// packages. Shards may run at the same time; rows.mjs makes rows of what they wrote.
//
//   node tools/bench/retrieval/run.mjs --out raw.jsonl [--device cuda] [--threads 2] [--shard 0/4] [--half chosen]
import { appendFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, evaluateRetrieval, readRetrievalExamples } from '../../../packages/eval/dist/index.js';
import { Model } from '../../../packages/model/dist/index.js';
import { createDevice } from '../../../packages/sparse-core/dist/index.js';
import { selections } from './selections.mjs';

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    device: { type: 'string', default: 'cpu' },
    threads: { type: 'string', default: '2' },
    shard: { type: 'string', default: '0/1' },
    // Settings were chosen on the examples of even number; only the others are reported.
    half: { type: 'string', default: 'reported' },
    lengths: { type: 'string', default: '1024,2048,4096,8192' },
    examples: { type: 'string', default: '20' },
  },
});
const numberOf = ({ id }) => Number(id.split('-').at(-1));
const [shard, shards] = values.shard.split('/').map(Number);
const lengths = values.lengths.split(',').map(Number);
const parity = values.half === 'chosen' ? 0 : 1;

const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`))
  .filter((example) => lengths.includes(example.length) && numberOf(example) % 2 === parity)
  .filter((example) => numberOf(example) < 2 * Number(values.examples))
  // An example of every task and length before the next: a run that is cut short is still balanced.
  .sort((one, other) => numberOf(one) - numberOf(other))
  .filter((_, index) => index % shards === shard);

const model = await Model.open(folder, {
  device: createDevice({ kind: values.device, threads: Number(values.threads) }),
});
const runner = model.createRunner({ sequences: 3, contextTokens: Math.max(...lengths) + 64 });
for (const [index, example] of examples.entries()) {
  const results = await evaluateRetrieval(runner, await encodeExample(model.tokenizer, example), selections);
  appendFileSync(values.out, results.map((result) => `${JSON.stringify(result)}\n`).join(''));
  if (index % 10 === 9) console.error(`${index + 1} of ${examples.length}`);
}
runner.dispose();
model.dispose();
