// Writes head-shares.json: how many tokens each kv head of the small model wants when all heads of all layers compete
// for one budget, as a multiple of an equal share. Looks only at examples of even number, which are not reported.
//
//   node tools/bench/retrieval/choose-head-shares.mjs
import { writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { encodeExample, readRetrievalExamples } from '../../../packages/eval/dist/index.js';
import { observationScores } from '../../../packages/hbw-select/dist/index.js';
import { Model, prefill } from '../../../packages/model/dist/index.js';

const [window, halo, keptShare, floor, perCell] = [16, 25, 1 / 16, 0.25, 4];
const folder = fileURLToPath(new URL('../../../models/needle-8m', import.meta.url));

/** Keeps everything, and reads the scores that `halo` would select by. */
function readingScores(heads) {
  return {
    name: 'reading scores',
    observationWindow: window,
    select(stream, { store, slot, lastQueries, scale }) {
      const { index, kvHeads } = store.layer;
      const [held] = store.lengths(slot);
      const prefix = held - window;
      const scores = stream.device.tensor('f32', ['batch', 'kvHead', 'token'], [1, kvHeads, prefix]);
      const slots = stream.device.tensor('i32', ['batch'], [1], Int32Array.of(slot));
      const queryStart = stream.device.tensor('i32', ['boundary'], [2], Int32Array.of(0, window));
      const blocks = store.denseBlocks();
      observationScores(stream, { query: lastQueries, scores, blocks, slots, queryStart, scale });
      const read = scores.read();
      for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
        heads.push(read.then((all) => ({ layer: index, kvHead, scores: all.slice(kvHead * prefix, (kvHead + 1) * prefix) })));
      }
      for (const tensor of [scores, slots, queryStart]) tensor.dispose();
      return undefined;
    },
  };
}

function poolMaximum(scores) {
  const reach = (halo - 1) / 2;
  return scores.map((_, token) => Math.max(...scores.subarray(Math.max(0, token - reach), token + reach + 1)));
}

/** What each head gets when every head has its floor and the best scores of all heads the rest. */
function compete(heads) {
  const kept = Math.floor(heads[0].scores.length * keptShare);
  const least = Math.floor(kept * floor);
  const beyond = heads.map(({ scores }) => poolMaximum(scores).sort().reverse().subarray(least));
  const bids = beyond.flatMap((scores, head) => Array.from(scores, (score) => ({ score, head })));
  bids.sort((one, other) => other.score - one.score);
  const won = heads.map(() => least);
  for (const { head } of bids.slice(0, (kept - least) * heads.length)) won[head] += 1;
  return won.map((tokens) => tokens / kept);
}

const model = await Model.open(folder);
const runner = model.createRunner({ contextTokens: 8192 });
const all = await readRetrievalExamples(`${folder}/eval/eval.jsonl.gz`);
const chosen = all.filter(({ id }) => Number(id.split('-').at(-1)) % 2 === 0 && Number(id.split('-').at(-1)) < 2 * perCell);
const { layers, kvHeads } = model.config;
const sums = Array.from({ length: layers }, () => new Array(kvHeads).fill(0));
for (const example of chosen) {
  const reads = [];
  const sequence = runner.openSequence({ select: readingScores(reads) });
  const { prompt } = await encodeExample(model.tokenizer, example);
  (await prefill(runner, sequence, prompt)).dispose();
  const heads = await Promise.all(reads);
  sequence.dispose();
  compete(heads).forEach((share, index) => {
    const { layer, kvHead } = heads[index];
    sums[layer][kvHead] += share / chosen.length;
  });
}
const rounded = sums.map((shares) => shares.map((share) => Number(share.toFixed(2))));
writeFileSync(new URL('head-shares.json', import.meta.url), `${JSON.stringify(rounded)}\n`);
console.log(rounded);
runner.dispose();
model.dispose();
