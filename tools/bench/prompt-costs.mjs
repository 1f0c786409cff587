// Perplexity and operations of attention against the length of a prompt (Fig. 6 of Sparse Skeleton), and which share of the
// operations the estimate has (Table 3), of the small model and of synthetic maps: rows of
// docs/benchmarks/skeleton-quality.json. Needs built packages.
//
//   node tools/bench/prompt-costs.mjs [--lengths 1024,2048,4096,8192,16384] [--only TEXT]
//
// --only: the settings whose names hold the text, and dense prompts; no synthetic maps.
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { readTexts, textLoss } from '../../packages/eval/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import {
  antidiagonalPrefill,
  clusteredPrefill,
  pooledPrefill,
  skeletonPrefill,
  verticalSlashPrefill,
} from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice, densePrefill, kvPolicy } from '../../packages/sparse-core/dist/index.js';
import { antidiagonalFlops, attentionFlops, blocksSeen, clusteredFlops, pooledFlops, skeletonFlops, verticalSlashFlops } from './flops.mjs';
import { keepRows, stamp, summarise } from './results.mjs';
import { blocksOfSyntheticMap } from './synthetic-maps.mjs';

const { values } = parseArgs({
  options: { lengths: { type: 'string', default: '1024,2048,4096,8192,16384' }, only: { type: 'string', default: '' } },
});
const lengths = values.lengths.split(',').map(Number);
const epsilon = 0.8;
/** The published rules where there are; MInference's numbers of lines are searched for a model, so it has an epsilon, too. */
const settings = {
  dense: { prefill: densePrefill(), flops: () => 0 },
  'skeleton, ε = 0.8': { prefill: skeletonPrefill({ epsilon }), flops: skeletonFlops },
  'skeleton, ε = 0.8 at 4096 tokens': { prefill: skeletonPrefill({ epsilon, referenceTokens: 4096 }), flops: skeletonFlops },
  // As large as what the reference row gives a prompt of 16,384 tokens.
  'skeleton, budget 0.075': { prefill: skeletonPrefill({ budget: 0.075 }), flops: skeletonFlops },
  'skeleton, budget 1/8': { prefill: skeletonPrefill({ budget: 1 / 8 }), flops: skeletonFlops },
  'vertical-slash, ε = 0.8': { prefill: verticalSlashPrefill({ epsilon }), flops: verticalSlashFlops },
  'antidiagonal, mass 0.9': { prefill: antidiagonalPrefill({ mass: 0.9 }), flops: antidiagonalFlops },
  'pooled, 0.1 of the best block': { prefill: pooledPrefill({ ofMax: 0.1 }), flops: pooledFlops },
  'clustered, ε = 0.8': { prefill: clusteredPrefill({ epsilon }), flops: clusteredFlops },
};

const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const device = createDevice({ threads: 2 });
const model = await Model.open(folder, { device });
/** No setting of a preset was chosen by these texts. Each has 8,192 tokens; a longer prompt is several, one behind the other. */
const texts = await Promise.all((await readTexts(`${folder}/eval/ppl.jsonl.gz`)).slice(4, 12).map((text) => model.tokenizer.encode(text)));
const promptsOf = (length) => {
  const of = Math.ceil(length / texts[0].length);
  return Array.from({ length: 4 }, (_, prompt) => {
    return Int32Array.from(texts.slice(prompt * of, (prompt + 1) * of).flatMap((ids) => [...ids])).subarray(0, length);
  });
};

/** Reads a text in one step: its loss, and the operations of all layers. */
async function read(ids, { prefill, flops }) {
  const layers = [];
  const reading = {
    ...prefill,
    attend(stream, call) {
      const attended = prefill.attend(stream, call);
      const [{ position, rows }] = call.batch.entries;
      const step = { ...call.store.layer, pairs: call.rope.inverseFrequencies.length, rows, tokens: position + rows };
      // Of the text, and not of the token that it begins with.
      if (rows > 1) layers.push(Promise.resolve(attended.report).then((report) => ({ step, ...report })));
      return attended;
    },
  };
  const runner = model.createRunner({ policy: kvPolicy({ prefill: reading }), contextTokens: ids.length, maxBatchRows: ids.length });
  const { crossEntropy } = await textLoss(runner, ids);
  runner.dispose();
  let [attention, estimate] = [0, 0];
  for (const { step, density, fallback } of await Promise.all(layers)) {
    attention += attentionFlops(step, density * step.queryHeads * blocksSeen(step));
    if (fallback === undefined) estimate += flops(step);
  }
  return { crossEntropy, attention, estimate };
}

const row = (measure, shapes, kind, unit, better, samples, reference) => ({
  measure,
  ...{ shapes, device: 'cpu', kind, unit, better, result: summarise(samples) },
  ...(reference && { reference: { name: 'dense', ...summarise(reference) } }),
  ...{ chart: false, ...stamp() },
});
const gigaflops = (each) => (each.attention + each.estimate) / 1e9;
const shareOfEstimate = (each) => (100 * each.estimate) / (each.attention + each.estimate);

/** All settings behind prompts of one length. */
async function promptsOfModel(length) {
  const shapes = { model: 'needle-8m', tokens: length };
  const rows = [];
  let dense;
  const chosen = Object.entries(settings).filter(([name]) => name === 'dense' || name.includes(values.only));
  for (const [name, setting] of chosen) {
    const found = [];
    for (const ids of promptsOf(length)) found.push(await read(ids, setting));
    const perplexity = [Math.exp(found.reduce((sum, { crossEntropy }) => sum + crossEntropy, 0) / found.length)];
    dense ??= { perplexity, flops: found.map(gigaflops) };
    const reference = name === 'dense' ? undefined : dense;
    const of = `4 prompts of ${length} tokens in one step, ${name}`;
    rows.push(row(`perplexity of ${of}`, shapes, 'small-model', '', 'lower', perplexity, reference?.perplexity));
    rows.push(row(`operations of attention, ${of}`, shapes, 'small-model', 'GFLOP', 'lower', found.map(gigaflops), reference?.flops));
    const shares = found.map(shareOfEstimate);
    if (reference) rows.push(row(`the estimate's share of them, ${of}`, shapes, 'small-model', '%', 'lower', shares));
    console.log(of, perplexity[0].toFixed(3), summarise(found.map(gigaflops)).median.toFixed(1), summarise(shares).median.toFixed(1), '%');
  }
  return rows;
}

/** The paper's lengths and sizes of a head, of 4 query heads a kv head. The estimate's operations do not depend on the map. */
async function syntheticMap(thousands) {
  const tokens = thousands * 1024;
  const { taken, seen } = await blocksOfSyntheticMap(device, tokens, epsilon);
  const step = { queryHeads: 4, kvHeads: 1, headDim: 128, pairs: 64, rows: tokens, tokens };
  const counts = { attention: attentionFlops(step, 4 * taken), estimate: skeletonFlops(step) };
  const dense = attentionFlops(step, 4 * seen) / 1e9;
  const shapes = { ...step, epsilon };
  const of = `a synthetic map of ${thousands}K tokens, ε = ${epsilon}`;
  console.log(of, gigaflops(counts).toFixed(0), dense.toFixed(0), shareOfEstimate(counts).toFixed(2), '%', (100 * taken / seen).toFixed(2));
  return [
    row(`operations of attention, ${of}`, shapes, 'simulated', 'GFLOP', 'lower', [gigaflops(counts)], [dense]),
    row(`the estimate's share of them, ${of}`, shapes, 'simulated', '%', 'lower', [shareOfEstimate(counts)]),
  ];
}

const rows = [];
const thousandsOfMaps = values.only === '' ? [10, 20, 30, 50, 80, 128, 256, 400, 750, 1024] : [];
for (const thousands of thousandsOfMaps) rows.push(...(await syntheticMap(thousands)));
for (const length of lengths) rows.push(...(await promptsOfModel(length)));
keepRows('skeleton-quality', 'Sparse Skeleton: what it leaves out, and what that costs', rows);
model.dispose();
