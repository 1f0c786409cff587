// How the skeleton's estimate of a prompt in several steps differs from that in one step, in maps of the small model: rows of
// docs/benchmarks/skeleton-quality.json. Needs built packages.
//
//   node tools/bench/estimate-in-steps.mjs [--tokens 8192] [--steps 8] [--budget 0.125]
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { readTexts } from '../../packages/eval/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import { decomposeAttention, decompositionStateBytes, selectKeyBlocks } from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { readPrompt } from './read-prompt.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const options = { tokens: { type: 'string', default: '8192' }, steps: { type: 'string', default: '8' }, budget: { type: 'string', default: '0.125' } };
const { values } = parseArgs({ options });
const [tokens, steps, budget] = [values.tokens, values.steps, values.budget].map(Number);
const rows = tokens / steps;
const [tileRows, blockTokens, everyRow] = [128, 64, 16];
/** Of the samples. */
const seeds = [0, 1, 2, 3];
const device = createDevice({ threads: 2 });
const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device });
const ids = (await model.tokenizer.encode((await readTexts(`${folder}/eval/ppl.jsonl.gz`)).join('\n'))).subarray(0, tokens);

/** The blocks that the last `rows` rows of the prompt take in each layer, of an estimate in steps of `stepRows`. */
async function listsOf(stepRows, seed) {
  const states = new Map();
  const lists = [];
  const see = (stream, { query, store, batch, rope, scale }) => {
    const { index, queryHeads, kvHeads, headDim } = store.layer;
    const pairs = rope.inverseFrequencies.length;
    const state = states.get(index) ?? device.tensor('u8', ['byte'], [decompositionStateBytes({ queryHeads, kvHeads, headDim, pairs })]);
    states.set(index, state);
    const [{ position }] = batch.entries;
    const end = position + batch.rows;
    const zeros = (axis, length) => device.tensor('f32', ['queryHead', axis], [queryHeads, length]);
    const parts = { slash: zeros('lag', end), vertical: zeros('key', end), horizontal: zeros('row', batch.rows) };
    decomposeAttention(stream, {
      ...{ query, blocks: store.denseBlocks(), slots: batch.slots, queryStart: batch.queryStart, scale, ...parts, state, seed },
      seenTokens: position,
      inverseFrequencies: device.tensor('f32', ['pair'], [pairs], rope.inverseFrequencies),
      ...{ convention: rope.convention, attentionScale: rope.attentionScale },
    });
    if (end < tokens) return;
    const own = device.tensor('f32', ['queryHead', 'row'], [queryHeads, rows]);
    for (let head = 0; head < queryHeads; head++) {
      const from = parts.horizontal.slice('queryHead', head, head + 1).slice('row', batch.rows - rows, batch.rows);
      stream.copy(from, own.slice('queryHead', head, head + 1));
    }
    const counts = device.tensor('i32', ['queryHead', 'queryTile'], [queryHeads, rows / tileRows]);
    const blocks = device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [queryHeads, rows / tileRows, tokens / blockTokens]);
    selectKeyBlocks(stream, { ...parts, horizontal: own, threshold: { budget }, tileRows, keyBlocks: blocks, keyBlockCounts: counts });
    lists.push(Promise.all([blocks.read(stream), counts.read(stream)]));
  };
  await readPrompt(model, ids, see, { maxBatchRows: stepRows });
  for (const state of states.values()) state.dispose();
  return (await Promise.all(lists)).flatMap(([blocks, counts]) =>
    Array.from(counts, (count, list) => new Set(blocks.subarray((list * tokens) / blockTokens, (list * tokens) / blockTokens + count))),
  );
}

/** Of each tile of the last `rows` rows the share of attention that falls on each block. */
async function sharesOfBlocks() {
  const reads = [];
  await readPrompt(model, ids, (stream, { query, keys, scale, store }) => {
    reads.push(Promise.all([query.read(stream), keys.read(stream), scale, store.layer]));
  });
  const shares = [];
  for (const [queries, keys, scale, { queryHeads, kvHeads, headDim }] of await Promise.all(reads)) {
    for (let head = 0; head < queryHeads; head++) {
      const kvHead = Math.floor((head * kvHeads) / queryHeads);
      for (let tile = tokens - rows; tile < tokens; tile += tileRows) {
        const sums = new Float64Array(tokens / blockTokens);
        for (let at = tile; at < tile + tileRows; at += everyRow) {
          const logits = new Float64Array(at + 1);
          const query = queries.subarray((at * queryHeads + head) * headDim, (at * queryHeads + head + 1) * headDim);
          for (let key = 0; key <= at; key++) {
            const from = (key * kvHeads + kvHead) * headDim;
            let sum = 0;
            for (let dim = 0; dim < headDim; dim++) sum += query[dim] * keys[from + dim];
            logits[key] = sum * scale;
          }
          const most = logits.reduce((a, b) => Math.max(a, b));
          const all = logits.reduce((sum, x) => sum + Math.exp(x - most), 0);
          logits.forEach((x, key) => (sums[Math.floor(key / blockTokens)] += (Math.exp(x - most) / all) * (everyRow / tileRows)));
        }
        shares.push(sums);
      }
    }
  }
  return shares;
}

const shares = await sharesOfBlocks();
const ofSeeds = async (stepRows) => {
  const lists = [];
  for (const seed of seeds) lists.push(await listsOf(stepRows, seed));
  return lists;
};
const [one, several] = [await ofSeeds(tokens), await ofSeeds(rows)];
const held = shares.map((share) => (taken) => [...taken].reduce((sum, block) => sum + share[block], 0));
const heldBy = (of) => (100 * held.reduce((sum, heldOf, list) => sum + heldOf(of[list]), 0)) / held.length;
const inCommon = (a, b) => {
  const count = (belongs) => a.reduce((sum, set, list) => sum + [...set].filter((block) => belongs(block, list)).length, 0);
  return (100 * count((block, list) => b[list].has(block))) / count(() => true);
};
const pairs = (a, b) => a.flatMap((of, seed) => b.filter((_, other) => other !== seed).map((taken) => inCommon(of, taken)));
const row = (measure, samples) => ({
  measure: `last ${rows} of ${tokens} rows, blocks for a budget of ${budget}: ${measure}`,
  ...{ shapes: { model: 'needle-8m', tokens, steps, budget, lists: shares.length }, device: 'cpu', kind: 'small-model', unit: '%', better: 'higher' },
  ...{ result: summarise(samples), chart: false, ...stamp() },
});
const found = [
  row('attention on them, estimate in one step', one.map(heldBy)),
  row(`attention on them, estimate in ${steps} steps`, several.map(heldBy)),
  row('those of one step that one step with other samples takes', pairs(one, one)),
  row(`those of one step that ${steps} steps with other samples take`, pairs(one, several)),
];
for (const { measure, result } of found) console.log(measure, result);
keepRows('skeleton-quality', 'Sparse Skeleton: what it leaves out, and what that costs', found);
model.dispose();
