// Asks the small model's questions, and measures its perplexity, with each sparsity of a HieraSparse cache, and writes a
// JSON line for each result. What a file holds already is not measured again. Needs built packages; an hour on one core.
// store-rows.mjs makes rows of what this wrote.
//
//   node tools/bench/retrieval/stores.mjs --out raw.jsonl [--examples 6] [--texts 4] [--threads 1] [--device cpu]
import { appendFileSync, existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, readRetrievalExamples, readTexts, textLoss } from '../../../packages/eval/dist/index.js';
import { generateTokens, Model } from '../../../packages/model/dist/index.js';
import { createDevice, kvPolicy } from '../../../packages/sparse-core/dist/index.js';
import { settings } from './store-settings.mjs';

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    examples: { type: 'string', default: '6' },
    texts: { type: 'string', default: '4' },
    threads: { type: 'string', default: '1' },
    device: { type: 'string', default: 'cpu' },
  },
});
const length = 4096;
const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const numberOf = ({ id }) => Number(id.split('-').at(-1));

const known = existsSync(values.out) ? readFileSync(values.out, 'utf8').trimEnd().split('\n') : [];
const done = new Set(known.map((line) => JSON.parse(line)).map(({ setting, item }) => `${setting} ${item}`));

/** Whether greedy decoding gives the whole answer, and what the cache held when the prompt was read. */
async function ask(runner, { prompt, answer }) {
  let [kvBytes, count] = [undefined, 0];
  for await (const { id } of generateTokens(runner, prompt, { maxTokens: answer.length, endIds: [] })) {
    kvBytes ??= runner.kvBytes.device;
    if (id !== answer[count]) break;
    count++;
  }
  return { right: count === answer.length, kvBytes };
}

/** Measures every item under every setting, an item at a time: a run that is cut short is still balanced. */
async function measureAll(items, contextTokens, measure) {
  const runners = settings.map(({ parts }) => model.createRunner({ policy: kvPolicy(parts()), contextTokens }));
  for (const { item, ...input } of items) {
    for (const [index, { name }] of settings.entries()) {
      if (done.has(`${name} ${item}`)) continue;
      const result = await measure(runners[index], input);
      appendFileSync(values.out, `${JSON.stringify({ setting: name, item, ...result })}\n`);
    }
    console.error(item);
  }
  for (const runner of runners) runner.dispose();
}

const model = await Model.open(folder, {
  device: createDevice({ kind: values.device, threads: Number(values.threads) }),
});
const texts = (await readTexts(`${folder}/eval/ppl.jsonl.gz`)).slice(0, Number(values.texts));
const losses = texts.map((text, index) => ({ item: `text ${index}`, text }));
await measureAll(losses, 8256, async (runner, { text }) => {
  const ids = await model.tokenizer.encode(text);
  // Steps of one block: a token sees as much of its neighbourhood dense as one of an answer does.
  const { crossEntropy, tokens } = await textLoss(runner, ids, { contextTokens: ids.length / 2, chunkTokens: 64 });
  return { crossEntropy, tokens };
});
const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`))
  .filter((example) => example.length === length && numberOf(example) < Number(values.examples))
  .sort((one, other) => numberOf(one) - numberOf(other))
  .map((example) => ({ item: example.id, example }));
await measureAll(examples, length + 64, async (runner, { example }) => ({
  task: example.task,
  ...(await ask(runner, await encodeExample(model.tokenizer, example))),
}));
model.dispose();
