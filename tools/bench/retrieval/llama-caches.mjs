// Asks the small model's questions, and those of the main job, through llama.cpp with caches of its own types, on the same
// weights and token ids, and writes a JSON line for each, as stores.mjs does: codec-rows.mjs sets them beside ours. What a
// file holds already is not asked again. Its prompts take long: 10 s for 4,096 tokens, and a minute and a half for the main job's.
//
//   node tools/bench/retrieval/llama-caches.mjs --out raw.jsonl [--caches Q8_0,Q4_0] [--threads 1] [--shard 0/4]
//     [--lengths 4096,8192] [--examples 40]
import { appendFileSync, existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { encodeExample, readRetrievalExamples } from '../../../packages/eval/dist/index.js';
import { Model } from '../../../packages/model/dist/index.js';
import { ggufOf } from '../cache.mjs';
import { open } from '../peers/llama-cpp.mjs';

const { values } = parseArgs({
  options: {
    out: { type: 'string' },
    caches: { type: 'string', default: 'Q8_0,Q4_0' },
    threads: { type: 'string', default: '1' },
    shard: { type: 'string', default: '0/1' },
    lengths: { type: 'string', default: '4096,8192' },
    // Of each task and length.
    examples: { type: 'string', default: '40' },
  },
});
/** Bits of an element of a key or a value, scales included. */
const bitsOf = { F16: 16, Q8_0: 8.5, Q4_0: 4.5 };
const lengths = values.lengths.split(',').map(Number);
const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));
const numberOf = ({ id }) => Number(id.split('-').at(-1));
const known = existsSync(values.out) ? readFileSync(values.out, 'utf8').split('\n').filter(Boolean) : [];
const done = new Set(known.map((line) => JSON.parse(line)).map(({ setting, item }) => `${setting} ${item}`));

const model = await Model.open(folder);
const { layers, kvHeads, headDim } = model.config;

async function mainJob() {
  const read = (name) => readFileSync(`${folder}/documents/constitution/${name}`, 'utf8');
  const document = read('document.txt').trimEnd();
  return JSON.parse(read('questions.json')).map(({ question, answer }, index) => ({
    item: `main job ${index}`,
    encode: async () => ({
      prompt: await model.tokenizer.encode(`${document}\n${question}`),
      answer: await model.tokenizer.encode(answer, { addSpecialTokens: false }),
    }),
  }));
}

const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`))
  .filter((example) => lengths.includes(example.length) && numberOf(example) < Number(values.examples))
  .sort((one, other) => numberOf(one) - numberOf(other) || one.length - other.length)
  .map((example) => ({
    item: example.id,
    ...{ task: example.task, length: example.length },
    encode: () => encodeExample(model.tokenizer, example),
  }));

const [shard, shards] = values.shard.split('/').map(Number);
const own = [];
for (const [index, { encode, ...item }] of [...(await mainJob()), ...examples].entries()) {
  if (index % shards === shard) own.push({ item, ...(await encode()) });
}
model.dispose();
const contextTokens = Math.max(...own.map(({ prompt, answer }) => prompt.length + answer.length + 1));
const opened = { model: { gguf: ggufOf(folder, 'needle-8m') }, threads: Number(values.threads), contextTokens, keepsPrompt: true };
const caches = await Promise.all(values.caches.split(',').map(async (cacheType) => ({ cacheType, llama: await open({ ...opened, cacheType }) })));
for (const { item, prompt, answer } of own) {
  for (const { cacheType, llama } of caches) {
    const setting = `llama.cpp ${cacheType}`;
    if (done.has(`${setting} ${item.item}`)) continue;
    let count = 0;
    for await (const id of llama.generate([...prompt], answer.length)) {
      if (id !== answer[count]) break;
      count++;
    }
    const kvBytes = (prompt.length * layers * kvHeads * headDim * 2 * bitsOf[cacheType]) / 8;
    appendFileSync(values.out, `${JSON.stringify({ setting, ...item, device: 'cpu', right: count === answer.length, kvBytes })}\n`);
  }
  console.error(item.item);
}
for (const { llama } of caches) await llama.close();
