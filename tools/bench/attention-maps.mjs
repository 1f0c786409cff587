// Draws an attention map of the small model, the parts that decomposeAttention finds in it, and the blocks that are computed:
// docs/pictures/attention-map-*.png. Needs built packages.
//
//   node tools/bench/attention-maps.mjs [--tokens 4096] [--layer 5] [--head 4] [--budget 0.25] [--out docs/pictures]
import { writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { PNG } from 'pngjs';
import { readTexts } from '../../packages/eval/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import { clusteredBlockScores, selectKeyBlocks, verticalSlashBlockScores } from '../../packages/skeleton-prefill/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { decomposeLayer } from './attention-parts.mjs';
import { readPrompt } from './read-prompt.mjs';

const { values } = parseArgs({
  options: {
    tokens: { type: 'string', default: '4096' },
    layer: { type: 'string', default: '5' },
    head: { type: 'string', default: '4' },
    budget: { type: 'string', default: '0.25' },
    out: { type: 'string', default: 'docs/pictures' },
  },
});
const [tokens, layer, head, budget] = [values.tokens, values.layer, values.head, values.budget].map(Number);
const pixels = 256;
const tile = { rows: 128, keys: 64 };
const [tiles, blocks] = [Math.ceil(tokens / tile.rows), Math.ceil(tokens / tile.keys)];

/** Queries, keys and parts of every head of one layer, read behind a prompt. */
async function readLayer(ids) {
  const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
  const device = createDevice({ threads: 2 });
  const model = await Model.open(folder, { device });
  let found;
  await readPrompt(model, await idsOf(model, ids), (stream, call) => {
    if (call.store.layer.index === layer) found = readParts(device, stream, call);
  });
  const read = await found;
  model.dispose();
  return read;
}

async function idsOf({ tokenizer }, texts) {
  // The starts of several texts, one behind the other: each looks at itself first.
  const parts = await Promise.all(texts.map((text) => tokenizer.encode(text)));
  return Int32Array.from(parts.flatMap((part) => [...part.subarray(0, tokens / texts.length)]));
}

async function readParts(device, stream, call) {
  const { store, batch, query, keys, scale } = call;
  const { queryHeads, kvHeads, headDim } = store.layer;
  const { slots, queryStart } = batch;
  const parts = decomposeLayer(device, stream, call);
  const scored = (operation) => {
    const scores = device.tensor('f32', ['queryHead', 'queryTile', 'keyBlock'], [queryHeads, tiles, blocks]);
    operation(stream, { query, blocks: store.denseBlocks(), slots, queryStart, scale, scores });
    return { scores, tokens, rows: tokens };
  };
  const takes = (estimate, always) => takenBlocks(device, stream, { queryHeads, ...estimate }, always);
  const masks = {
    blocks: takes(parts),
    'blocks-lines': takes(scored(verticalSlashBlockScores), { sinkTokens: 30 }),
    'blocks-clusters': takes(scored(clusteredBlockScores), { sinkTokens: 0, diagonalTokens: 1 }),
  };
  const [queries, allKeys, slash, vertical, horizontal] = await Promise.all([query, keys, ...Object.values(parts)].map((tensor) => tensor.read(stream)));
  const taken = Object.fromEntries(await Promise.all(Object.entries(masks).map(async ([name, mask]) => [name, await mask])));
  return { queries, keys: allKeys, slash, vertical, horizontal, taken, scale, queryHeads, kvHeads, headDim };
}

/** Of each query head whether `taken[tile * blocks + block]`. */
async function takenBlocks(device, stream, { queryHeads, ...estimate }, always) {
  const keyBlocks = device.tensor('i32', ['queryHead', 'queryTile', 'listedBlock'], [queryHeads, tiles, blocks]);
  const keyBlockCounts = device.tensor('i32', ['queryHead', 'queryTile'], [queryHeads, tiles]);
  selectKeyBlocks(stream, { ...estimate, ...always, threshold: { budget }, keyBlocks, keyBlockCounts });
  const [lists, counts] = await Promise.all([keyBlocks.read(stream), keyBlockCounts.read(stream)]);
  const taken = Array.from({ length: queryHeads }, () => new Uint8Array(tiles * blocks));
  counts.forEach((count, list) => {
    const [ofHead, ofTile] = [Math.floor(list / tiles), list % tiles];
    for (const block of lists.subarray(list * blocks, list * blocks + count)) taken[ofHead][ofTile * blocks + block] = 1;
  });
  return taken;
}

/** Logarithms of the attention map of a head, row by row. */
function mapOf({ queries, keys, queryHeads, kvHeads, headDim, scale }, of) {
  const kvHead = Math.floor((of * kvHeads) / queryHeads);
  const map = new Float32Array(tokens * tokens).fill(-Infinity);
  for (let row = 0; row < tokens; row++) {
    const q = queries.subarray((row * queryHeads + of) * headDim, (row * queryHeads + of + 1) * headDim);
    let most = -Infinity;
    for (let key = 0; key <= row; key++) {
      const at = (key * kvHeads + kvHead) * headDim;
      let sum = 0;
      for (let dim = 0; dim < headDim; dim++) sum += q[dim] * keys[at + dim];
      map[row * tokens + key] = sum * scale;
      most = Math.max(most, sum * scale);
    }
    let mass = 0;
    for (let key = 0; key <= row; key++) mass += Math.exp(map[row * tokens + key] - most);
    const norm = most + Math.log(mass);
    for (let key = 0; key <= row; key++) map[row * tokens + key] -= norm;
  }
  return map;
}

/** From the least to the most: dark blue, teal, yellow. */
function colour(share) {
  const stops = [[13, 8, 70], [30, 110, 130], [120, 190, 90], [253, 231, 37]];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  return stops[first].map((from, channel) => Math.round(from + (place - first) * (stops[first + 1][channel] - from)));
}

/** The largest of `at(row, key)` in each pixel; undefined above the diagonal. */
function pixelsOf(at) {
  const step = tokens / pixels;
  return Array.from({ length: pixels * pixels }, (_, pixel) => {
    const [x, y] = [pixel % pixels, Math.floor(pixel / pixels)];
    if (x > y) return undefined;
    let largest = -Infinity;
    for (let row = y * step; row < (y + 1) * step; row++) {
      for (let key = x * step; key < (x + 1) * step && key <= row; key++) largest = Math.max(largest, at(row, key));
    }
    return largest;
  });
}

/** A picture of `at(row, key)`, from the least to the most of a range; default: of all but a fiftieth at either end. */
function draw(name, at, range) {
  const all = pixelsOf(at);
  const sorted = all.filter(Number.isFinite).toSorted((a, b) => a - b);
  const [least, most] = range ?? [sorted[Math.floor(sorted.length * 0.02)], sorted[Math.floor(sorted.length * 0.98)]];
  const png = new PNG({ width: pixels, height: pixels, colorType: 2 });
  all.forEach((value, pixel) => {
    const rgb = value === undefined ? [255, 255, 255] : colour((value - least) / (most - least));
    png.data.set([...rgb, 255], 4 * pixel);
  });
  writeFileSync(`${values.out}/attention-map-${name}.png`, PNG.sync.write(png, { colorType: 2, deflateLevel: 9 }));
}

const folder = fileURLToPath(new URL('../../models/needle-8m', import.meta.url));
const texts = (await readTexts(`${folder}/eval/ppl.jsonl.gz`)).slice(0, 4);
const read = await readLayer(texts);
const of = (numbers) => numbers.subarray(head * tokens, (head + 1) * tokens);
const [slash, vertical, horizontal] = [of(read.slash), of(read.vertical), of(read.horizontal)];
const map = mapOf(read, head);
const visible = [-14, -2];
draw('exact', (row, key) => map[row * tokens + key], visible);
draw('slash', (row, key) => slash[row - key]);
draw('vertical', (_row, key) => vertical[key]);
draw('horizontal', (row) => horizontal[row]);
draw('estimate', (row, key) => slash[row - key] + vertical[key] + horizontal[row], visible);
for (const [name, { [head]: taken }] of Object.entries(read.taken)) {
  const isTaken = (row, key) => taken[Math.floor(row / tile.rows) * blocks + Math.floor(key / tile.keys)];
  draw(name, isTaken, [0, 1]);
  let mass = 0;
  for (let row = 0; row < tokens; row++) for (let key = 0; key <= row; key++) mass += isTaken(row, key) * Math.exp(map[row * tokens + key]);
  const share = (100 * taken.reduce((sum, one) => sum + one, 0)) / (tiles * (tiles + 1));
  console.log(`${name}: ${share.toFixed(1)} % of the blocks of layer ${layer}, head ${head} hold ${((100 * mass) / tokens).toFixed(1)} % of its attention`);
}
