// Asks the small model's questions, and measures its perplexity, under each policy of a list, and writes a JSON line for
// each result. What a file holds already is not measured again. Needs built packages, or the test kit; shards may run at
// the same time. store-rows.mjs and prompt-rows.mjs make rows of what this wrote.
//
//   node tools/bench/retrieval/stores.mjs --out raw.jsonl [--settings store-settings] [--device cuda] [--threads 1]
//     [--shard 0/4] [--texts 24] [--lengths 4096,8192] [--tasks passkey,needle4] [--examples 40]
import { appendFileSync, existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, readRetrievalExamples, readTexts, textLoss } from '../../../packages/eval/dist/index.js';
import { generateTokens, Model } from '../../../packages/model/dist/index.js';
import { createDevice } from '../../../packages/sparse-core/dist/index.js';

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    // The list of policies: a file beside this one.
    settings: { type: 'string', default: 'store-settings' },
    device: { type: 'string', default: 'cpu' },
    threads: { type: 'string', default: '1' },
    shard: { type: 'string', default: '0/1' },
    texts: { type: 'string', default: '24' },
    lengths: { type: 'string', default: '4096,8192' },
    // All, if not given.
    tasks: { type: 'string' },
    // Of each task and length.
    examples: { type: 'string', default: '40' },
  },
});
const { settings } = await import(`./${values.settings}.mjs`);
const [shard, shards] = values.shard.split('/').map(Number);
const lengths = values.lengths.split(',').map(Number);
const tasks = values.tasks?.split(',');
const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const numberOf = ({ id }) => Number(id.split('-').at(-1));
const ownShare = (items) => items.filter((_, index) => index % shards === shard);

const known = existsSync(values.out) ? readFileSync(values.out, 'utf8').split('\n').filter(Boolean) : [];
const done = new Set(known.map((line) => JSON.parse(line)).map(({ setting, item }) => `${setting} ${item}`));

/** Whether greedy decoding gives the whole answer, what the cache held on device and host when the prompt was read, and the share of the prompt's attention that was computed. */
async function ask(runner, { prompt, answer }) {
  let [kvBytes, hostBytes, density, count] = [undefined, undefined, undefined, 0];
  const onReport = (report) => (density = report.density);
  for await (const { id } of generateTokens(runner, prompt, { maxTokens: answer.length, endIds: [], onReport })) {
    kvBytes ??= runner.kvBytes.device;
    hostBytes ??= runner.kvBytes.host;
    if (id !== answer[count]) break;
    count++;
  }
  return { right: count === answer.length, kvBytes, hostBytes, density };
}

/** Measures every item under every setting, an item at a time: a run that is cut short is still balanced. */
async function measureAll(items, contextTokens, encode, measure) {
  const runners = [];
  for (const { policy } of settings) runners.push(model.createRunner({ policy: await policy(model, { contextTokens }), contextTokens }));
  for (const { item, input } of items) {
    const encoded = await encode(input);
    for (const [index, { name }] of settings.entries()) {
      if (done.has(`${name} ${item}`)) continue;
      const result = await measure(runners[index], encoded);
      const line = { setting: name, item, device: values.device, ...result };
      appendFileSync(values.out, `${JSON.stringify(line)}\n`);
    }
    console.error(item);
  }
  for (const runner of runners) runner.dispose();
}

const model = await Model.open(folder, {
  device: createDevice({ kind: values.device, threads: Number(values.threads) }),
});
const { tokenizer } = model;

const texts = (await readTexts(`${folder}/eval/ppl.jsonl.gz`)).slice(0, Number(values.texts));
await measureAll(
  ownShare(texts.map((text, index) => ({ item: `text ${index}`, input: text }))),
  8256,
  (text) => tokenizer.encode(text),
  async (runner, ids) => {
    // Steps of one block: a token sees as much of its neighbourhood dense as one of an answer does.
    const { crossEntropy, tokens } = await textLoss(runner, ids, { contextTokens: ids.length / 2, chunkTokens: 64 });
    return { crossEntropy, tokens };
  },
);

const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`))
  .filter((example) => lengths.includes(example.length) && (tasks?.includes(example.task) ?? true) && numberOf(example) < Number(values.examples))
  .sort((one, other) => numberOf(one) - numberOf(other) || one.length - other.length);
await measureAll(
  ownShare(examples.map((example) => ({ item: example.id, input: example }))),
  Math.max(...lengths) + 64,
  (example) => encodeExample(tokenizer, example),
  async (runner, example) => {
    const { task, length } = example;
    return { task, length, ...(await ask(runner, example)) };
  },
);
model.dispose();
