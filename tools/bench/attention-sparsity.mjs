// How sparse attention is, in maps of the small model and in synthetic ones whose parts are known: rows of
// docs/benchmarks/skeleton-quality.json. Needs built packages.
//
//   node tools/bench/attention-sparsity.mjs [--tokens 4096]
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import ts from 'typescript';
import { readTexts } from '../../packages/eval/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import { skeletonPrefill } from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { decomposeLayer } from './attention-parts.mjs';
import { readPrompt } from './read-prompt.mjs';
import { keepRows, stamp, summarise } from './results.mjs';
import { blocksOfSyntheticMap, blockTokens } from './synthetic-maps.mjs';

const { values } = parseArgs({ options: { tokens: { type: 'string', default: '4096' } } });
const tokens = Number(values.tokens);
const epsilon = 0.8;
const device = createDevice({ threads: 2 });
const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const model = await Model.open(folder, { device });
const texts = await readTexts(`${folder}/eval/ppl.jsonl.gz`);
const ids = await model.tokenizer.encode(texts.join('\n'));

const row = (measure, shapes, unit, samples, kind = 'small-model') => ({
  measure,
  ...{ shapes, device: 'cpu', kind, unit, better: 'higher', result: summarise(samples), chart: false, ...stamp() },
});

/** What of the attention map of a head may be left out. Rows begin behind the first eighth, where there is something to leave. */
function measureHead(queryOf, keyOf, scale) {
  const first = tokens / 8;
  const blocks = Math.ceil(tokens / blockTokens);
  const mostOfBlocks = new Float64Array(blocks * blocks).fill(-Infinity);
  const scores = new Float64Array(tokens);
  const [count, found] = [{ elements: 0, blocks: 0 }, { exact: 0, threshold: 0, blocks: 0 }];
  const distances = [];
  for (let at = first; at < tokens; at++) {
    const query = queryOf(at);
    let most = -Infinity;
    for (let key = 0; key <= at; key++) {
      const keyRow = keyOf(key);
      let sum = 0;
      for (let dim = 0; dim < query.length; dim++) sum += query[dim] * keyRow[dim];
      scores[key] = sum * scale;
      most = Math.max(most, scores[key]);
    }
    if (at % 128 === 0) distances.push(distanceFromNormal(scores.slice(1, at - 99)));
    const shares = scores.slice(0, at + 1).map((score) => Math.exp(score - most));
    const mass = shares.reduce((sum, share) => sum + share, 0);
    shares.forEach((share, key) => {
      const block = Math.floor(at / blockTokens) * blocks + Math.floor(key / blockTokens);
      mostOfBlocks[block] = Math.max(mostOfBlocks[block], share / mass);
      if (share / mass < epsilon / tokens) found.threshold += 1;
    });
    shares.sort();
    for (let [lost, key] = [0, 0]; key < shares.length; key++) {
      lost += shares[key] / mass;
      if (lost >= epsilon) break;
      found.exact += 1;
    }
    count.elements += at + 1;
  }
  for (const most of mostOfBlocks) {
    if (most === -Infinity) continue;
    count.blocks += 1;
    if (most < epsilon / tokens) found.blocks += 1;
  }
  const share = (part, of) => (100 * part) / of;
  return {
    exact: share(found.exact, count.elements),
    threshold: share(found.threshold, count.elements),
    blocks: share(found.blocks, count.blocks),
    distance: summarise(distances).median,
  };
}

/** The largest difference between the distribution of numbers and the normal one of their mean and variance (Kolmogorov). */
function distanceFromNormal(numbers) {
  const mean = numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
  const deviation = Math.sqrt(numbers.reduce((sum, x) => sum + (x - mean) ** 2, 0) / numbers.length);
  const sorted = numbers.toSorted();
  return sorted.reduce((largest, x, index) => {
    const below = normalShareBelow((x - mean) / deviation);
    return Math.max(largest, Math.abs(below - index / sorted.length), Math.abs(below - (index + 1) / sorted.length));
  }, 0);
}

/** Abramowitz and Stegun 7.1.26, to 1.5e-7. */
function normalShareBelow(z) {
  const x = Math.abs(z) / Math.SQRT2;
  const t = 1 / (1 + 0.3275911 * x);
  const terms = [0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429];
  const half = terms.reduceRight((sum, term) => (sum + term) * t, 0) * Math.exp(-x * x) / 2;
  return z < 0 ? half : 1 - half;
}

/** Every head of the small model behind one text. */
async function mapsOfModel() {
  const reads = [];
  await readPrompt(model, ids.subarray(0, tokens), (stream, { query, keys, scale, store }) => {
    reads.push(Promise.all([query.read(stream), keys.read(stream), scale, store.layer]));
  });
  const heads = [];
  for (const [queries, keys, scale, { queryHeads, kvHeads, headDim }] of await Promise.all(reads)) {
    for (let head = 0; head < queryHeads; head++) {
      const kvHead = Math.floor((head * kvHeads) / queryHeads);
      const rowOf = (numbers, count, of) => (at) => numbers.subarray((at * count + of) * headDim, (at * count + of + 1) * headDim);
      heads.push(measureHead(rowOf(queries, queryHeads, head), rowOf(keys, kvHeads, kvHead), scale));
    }
  }
  const shapes = { model: 'needle-8m', tokens, epsilon, heads: heads.length };
  return [
    row(`of ${tokens} tokens, may be left out of a head: the least elements, together less than ε = ${epsilon}`, shapes, '%', heads.map(({ exact }) => exact)),
    row('the same: elements below ε / N', shapes, '%', heads.map(({ threshold }) => threshold)),
    row('the same: blocks of 64 × 64 whose largest element is below ε / N', shapes, '%', heads.map(({ blocks }) => blocks)),
    row('distance of the scores of a row from a normal distribution (Kolmogorov)', shapes, '', heads.map(({ distance }) => distance)),
  ];
}

/** What skeletonPrefill leaves out of prompts of several lengths. */
async function prompts() {
  const rows = [];
  for (const count of [1024, 2048, 4096, 8192, 16384]) {
    let density = 1;
    const skeleton = skeletonPrefill({ epsilon, denseLastRows: 0 });
    const onReport = (report) => (density = report.density);
    await readPrompt(model, ids.subarray(0, count), () => undefined, { attention: skeleton, onReport });
    rows.push(row(`left out of ${count} tokens, skeleton ε = ${epsilon}`, { model: 'needle-8m', tokens: count, epsilon }, '%', [100 * (1 - density)]));
  }
  return rows;
}

async function syntheticMaps() {
  const rows = [];
  for (const [count, name] of [[10240, '10K'], [131072, '128K'], [1048576, '1M']]) {
    const { taken, seen } = await blocksOfSyntheticMap(device, count, epsilon);
    rows.push(row(`left out of a synthetic map of ${name} tokens, ε = ${epsilon}`, { tokens: count, epsilon }, '%', [100 * (1 - taken / seen)], 'simulated'));
  }
  return rows;
}

/** The tests' definitions, among them Eq. 12 to 14, which no kernel has. */
async function definitions() {
  const source = readFileSync(new URL('../../packages/skeleton-prefill/src/testing/select-blocks-by-definition.ts', import.meta.url), 'utf8');
  const { outputText } = ts.transpileModule(source, { compilerOptions: { module: 'esnext', target: 'es2022' } });
  return await import(`data:text/javascript,${encodeURIComponent(outputText)}`);
}

/** Which blocks the threshold of Eq. 14 takes for a budget, of parts of different widths and of those of the small model. */
async function thresholdsOfMoments() {
  const { blockScores, thresholdOfMoments } = await definitions();
  const budget = 1 / 8;
  const options = { sinkTokens: 0, diagonalTokens: 1, tileRows: 64, slashBound: 'safe', denseRows: 0 };
  const takenOf = (skeleton) => {
    const scores = blockScores(skeleton, options).flat().filter((score) => score < Infinity);
    const threshold = thresholdOfMoments(skeleton, budget);
    return (100 * scores.filter((score) => score >= threshold).length) / scores.length;
  };
  let seed = 1;
  const random = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  const normals = (width) => {
    return Float64Array.from({ length: tokens }, () => width * Math.sqrt(-2 * Math.log(random())) * Math.cos(2 * Math.PI * random()));
  };
  const measure = (of) => `blocks that Eq. 14 takes for a budget of 1/8, of ${of} of ${tokens} tokens`;
  const rows = [['equally wide', 1, 1, 1], ['s ten times as wide', 10, 1, 1], ['v ten times as wide', 1, 10, 1], ['h ten times as wide', 1, 1, 10]].map(
    ([name, slash, vertical, horizontal]) => {
      const taken = takenOf({ slash: normals(slash), vertical: normals(vertical), horizontal: normals(horizontal) });
      return row(measure(`normal s, v and h, ${name},`), { tokens, budget }, '%', [taken], 'simulated');
    },
  );
  const reads = [];
  await readPrompt(model, ids.subarray(0, tokens), (stream, call) => {
    const parts = Object.values(decomposeLayer(device, stream, call));
    reads.push(Promise.all(parts.map((part) => part.read(stream))));
  });
  const heads = (await Promise.all(reads)).flatMap((parts) => {
    return Array.from({ length: parts[0].length / tokens }, (_, head) => {
      const [slash, vertical, horizontal] = parts.map((part) => part.subarray(head * tokens, (head + 1) * tokens));
      return takenOf({ slash, vertical, horizontal });
    });
  });
  const shapes = { model: 'needle-8m', tokens, budget, heads: heads.length };
  const mean = heads.reduce((sum, taken) => sum + taken, 0) / heads.length;
  return [
    ...rows,
    row(measure('the heads of the small model'), shapes, '%', heads),
    row(measure('all heads of the small model together'), shapes, '%', [mean]),
  ];
}

keepRows('skeleton-quality', 'Sparse Skeleton: what it leaves out, and what that costs', [
  ...(await mapsOfModel()),
  ...(await prompts()),
  ...(await syntheticMaps()),
  ...(await thresholdsOfMoments()),
]);
model.dispose();
