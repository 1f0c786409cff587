// What HCAttention's Figures 3 and 4 show, on the small model: the share of the tokens that hold 0.9 of the attention, layer by
// layer, and attention over keys in codes beside attention over the keys themselves. Rows of docs/benchmarks/hcattn-quality.json.
// Needs built packages.
//
//   node tools/bench/hcattn-attention.mjs
import { fileURLToPath } from 'node:url';
import { encodeExample, readRetrievalExamples } from '../../packages/eval/dist/index.js';
import { codedBlockBytes, decodeKeys, encodeKeys, loadCodebooks, placeCodebooks } from '../../packages/hcattn-quant/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { queriesAndKeys } from './read-prompt.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const [tau, length, lastRows, shownTokens, blockTokens] = [0.9, 4096, 64, 300, 64];
const groups = 16;
const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const device = createDevice({ threads: 2 });
const model = await Model.open(folder, { device });
const { layers, queryHeads, kvHeads, headDim } = model.config;
const scale = 1 / Math.sqrt(headDim);

/** The softmax of a row of a query head over the tokens up to its own. */
function attentionOf({ queries, keys }, row, head) {
  const kvHead = Math.floor((head * kvHeads) / queryHeads);
  const query = queries.subarray((row * queryHeads + head) * headDim, (row * queryHeads + head + 1) * headDim);
  const scores = Float64Array.from({ length: row + 1 }, (_, token) => {
    const at = (token * kvHeads + kvHead) * headDim;
    return query.reduce((sum, element, dim) => sum + element * keys[at + dim], 0) * scale;
  });
  const most = scores.reduce((larger, score) => Math.max(larger, score), -Infinity);
  const shares = scores.map((score) => Math.exp(score - most));
  const mass = shares.reduce((sum, share) => sum + share, 0);
  return shares.map((share) => share / mass);
}

/** The share of the tokens that reach `tau` of the attention, as Eq. 4 takes them. */
function chosenShare(attention) {
  let [sum, taken] = [0, 0];
  for (const share of attention.toSorted().reverse()) {
    sum += share;
    taken++;
    if (sum >= tau) break;
  }
  return taken / attention.length;
}

/** The keys of a layer as codes of its codebooks say them. */
async function decodedKeys({ keys, tokens }, placed) {
  const blocks = Math.ceil(tokens / blockTokens);
  const dense = new Float32Array(kvHeads * blocks * blockTokens * headDim);
  const placeOf = (token, kvHead) => (kvHead * blocks * blockTokens + token) * headDim;
  const eachKey = (visit) => {
    for (let token = 0; token < tokens; token++) {
      for (let kvHead = 0; kvHead < kvHeads; kvHead++) visit((token * kvHeads + kvHead) * headDim, placeOf(token, kvHead));
    }
  };
  eachKey((at, to) => dense.set(keys.subarray(at, at + headDim), to));
  const all = kvHeads * blocks;
  const stream = device.defaultStream;
  const held = device.tensor('f32', ['block', 'blockToken', 'dim'], [all, blockTokens, headDim], dense);
  const codedKeys = device.tensor('u8', ['codedBlock', 'byte'], [all, codedBlockBytes(groups, placed.codeBits)]);
  const numbers = Array.from({ length: all }, (_, block) => block);
  const args = { ...placed, codedKeys, keys: held, from: numbers, to: numbers, kvHeads: numbers.map((block) => Math.floor(block / blocks)) };
  encodeKeys(stream, args);
  decodeKeys(stream, args);
  const decoded = await held.read(stream);
  held.dispose();
  codedKeys.dispose();
  const back = new Float32Array(keys.length);
  eachKey((at, to) => back.set(decoded.subarray(to, to + headDim), at));
  return back;
}

const row = (measure, shapes, unit, samples, more) => ({
  ...{ measure, shapes: `needle-8m, ${shapes}`, device: 'cpu', kind: 'small-model', unit, better: 'lower' },
  ...{ result: summarise(samples), chart: false, ...more, ...stamp() },
});
const round = (number) => Number(number.toPrecision(3));
const mean = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;

const examples = (await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`)).filter((each) => each.length === length && each.id.endsWith('-0'));
const rows = [];
for (const example of examples) {
  const { prompt } = await encodeExample(model.tokenizer, example);
  const read = (await queriesAndKeys(model, prompt)).map(([queries, keys]) => ({ queries, keys, tokens: prompt.length }));
  const last = Array.from({ length: lastRows }, (_, index) => prompt.length - lastRows + index);
  const byLayer = read.map((layer) =>
    last.flatMap((at) => Array.from({ length: queryHeads }, (_, head) => 100 * chosenShare(attentionOf(layer, at, head)))),
  );
  const shapes = `last ${lastRows} rows of a prompt of ${prompt.length} tokens, ${queryHeads} heads, ${layers} layers`;
  const shares = byLayer.map((each) => round(mean(each)));
  rows.push(row(`tokens with ${tau} of the attention, ${example.task}`, shapes, '% of the tokens', shares, { byLayer: shares }));
  console.log(example.task, shares);
  if (example.task !== 'needle4') continue;
  const placed = await placeCodebooks(device, await loadCodebooks(`${folder}/codebooks-${groups}.safetensors`));
  const at = prompt.length - 1;
  for (const [index, layer] of read.entries()) {
    const coded = { ...layer, keys: await decodedKeys(layer, placed.layer(index)) };
    const differences = [];
    const heads = Array.from({ length: queryHeads }, (_, head) => [layer, coded].map((each) => attentionOf(each, at, head)));
    // Half the sum of the absolute differences of two distributions: the share that is elsewhere.
    for (const [own, other] of heads) differences.push(50 * own.reduce((sum, share, token) => sum + Math.abs(share - other[token]), 0));
    const [shown, shownCoded] = heads[0].map((attention) => Array.from(attention.subarray(0, shownTokens), round));
    const more = { shown, shownCoded };
    rows.push(row(`attention moved by codes of ${groups} groups, layer ${index}`, `last row of a prompt of ${prompt.length} tokens, ${queryHeads} heads`, '% of the attention', differences, more));
    console.log('layer', index, summarise(differences));
  }
  placed[Symbol.dispose]();
}
keepRows('hcattn-quality', 'Quality of the small model with caches of codes', rows);
model.dispose();
