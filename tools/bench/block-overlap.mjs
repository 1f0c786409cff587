// What SparseServe's Figure 8 shows, on the small model: which share of the blocks that an answer's step chooses the steps before it
// chose too, by how many of those are looked at. The last tokens of the document stand for an answer. Rows of
// docs/benchmarks/serving-quality.json. Needs built packages.
//
//   node tools/bench/block-overlap.mjs
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { queriesAndKeys } from './read-prompt.mjs';
import { keepRows, stamp, summarise } from './results.mjs';

const [tokens, steps, blockTokens, chosenBlocks, sinkBlocks, windowBlocks] = [16_000, 256, 32, 64, 1, 3];
const windows = [1, 2, 4, 8, 12, 16];
const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device: createDevice({ threads: 2 }) });
const { queryHeads, kvHeads, headDim } = model.config;
const group = queryHeads / kvHeads;

/** The two corners that ArkVale scores a block by (`cuboidMean`): `[vector, dim]`. */
function cornersOf(keys, kvHead, block) {
  const corners = new Float64Array(2 * headDim);
  for (let dim = 0; dim < headDim; dim++) {
    const column = Array.from({ length: blockTokens }, (_, token) => keys[((block * blockTokens + token) * kvHeads + kvHead) * headDim + dim]);
    const middle = (Math.min(...column) + Math.max(...column)) / 2;
    const half = column.reduce((sum, key) => sum + Math.abs(key - middle), 0) / blockTokens;
    corners[dim] = middle - half;
    corners[headDim + dim] = middle + half;
  }
  return corners;
}

/** The blocks that a step chooses, those that every step reads left out. */
function chosenOf(queries, corners, row, kvHead) {
  const last = Math.floor(row / blockTokens) - windowBlocks;
  const scores = Array.from({ length: last - sinkBlocks }, (_, index) => {
    const corner = corners[index + sinkBlocks];
    let best = -Infinity;
    for (let head = kvHead * group; head < (kvHead + 1) * group; head++) {
      let score = 0;
      for (let dim = 0; dim < headDim; dim++) {
        const query = queries[(row * queryHeads + head) * headDim + dim];
        score += Math.max(query * corner[dim], query * corner[headDim + dim]);
      }
      best = Math.max(best, score);
    }
    return { block: index + sinkBlocks, score: best };
  });
  scores.sort((one, other) => other.score - one.score);
  return new Set(scores.slice(0, chosenBlocks - sinkBlocks - windowBlocks - 1).map(({ block }) => block));
}

const text = readFileSync(`${folder}/documents/constitution/document.txt`, 'utf8');
const ids = (await model.tokenizer.encode(text)).subarray(0, tokens);
const layers = await queriesAndKeys(model, ids);
const shares = windows.map(() => []);
for (const [queries, keys] of layers) {
  for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
    const corners = Array.from({ length: Math.floor(ids.length / blockTokens) }, (_, block) => cornersOf(keys, kvHead, block));
    const chosen = Array.from({ length: steps }, (_, step) => chosenOf(queries, corners, ids.length - steps + step, kvHead));
    windows.forEach((window, index) => {
      const found = chosen.slice(windows.at(-1)).map((now, step) => {
        const before = new Set(chosen.slice(step + windows.at(-1) - window, step + windows.at(-1)).flatMap((each) => [...each]));
        return [...now].filter((block) => before.has(block)).length / now.size;
      });
      shares[index].push(found.reduce((sum, share) => sum + share, 0) / found.length);
    });
  }
}
model.dispose();
const percent = (share) => Number((100 * share).toFixed(2));
const rows = shares.map((ofHeads, index) => ({
  measure: `chosen blocks that one of the ${windows[index]} steps before chose too`,
  shapes: `needle-8m, ${steps - windows.at(-1)} tokens behind ${ids.length - steps} of a document, ${chosenBlocks} blocks of each kv head, sinks and window not counted`,
  ...{ device: 'cpu', kind: 'small-model', unit: '%', better: 'higher', result: summarise(ofHeads.map(percent)) },
  ...{ mean: percent(ofHeads.reduce((sum, share) => sum + share, 0) / ofHeads.length), chart: false, ...stamp() },
}));
for (const row of rows) console.log(`${row.measure}: ${row.mean} %`);
keepRows('serving-quality', 'Right answers of the small model when answers read some blocks', rows);
