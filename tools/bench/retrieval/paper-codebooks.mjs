// Codebooks of the small model of any size, trained once on the texts of tools/train-needle-model/calibration.py and kept in
// the cache of the benchmarks.
//
//   node tools/bench/retrieval/paper-codebooks.mjs   trains those of Tables 3 and 4, half a minute each on two cores
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { Calibration, loadCodebooks, placeCodebooks, saveCodebooks } from '../../../packages/hcattn-quant/dist/index.js';
import { Model, prefill } from '../../../packages/model/dist/index.js';
import { createDevice, kvPolicy } from '../../../packages/sparse-core/dist/index.js';
import { cacheFolder } from '../cache.mjs';

const folder = cacheFolder('codebooks');
const fileOf = ({ groups, centroids, separate = false }) => join(folder, `needle-8m-${groups}-${centroids}${separate ? '-separate' : ''}.safetensors`);

/** Those of Table 4, of heads of 64: sub-vectors have as many dims as the paper's, whose heads have 128. */
export const books = [
  ...[256, 1024, 2048, 4096, 8192].map((centroids) => ({ groups: 16, centroids })),
  ...[8, 32].map((groups) => ({ groups, centroids: 8192 })),
  // 39 vectors for each of 8,192 centroids of one group would take 319,488 tokens.
  ...[false, true].map((separate) => ({ groups: 32, centroids: 1024, separate })),
];

export const placedBooks = (book) => async ({ device }) => await placeCodebooks(device, await loadCodebooks(fileOf(book)));

function calibrationTexts() {
  const texts = join(folder, 'texts');
  const script = fileURLToPath(new URL('../../train-needle-model/calibration.py', import.meta.url));
  if (!existsSync(texts)) execFileSync('python3', [script, texts]);
  return readdirSync(texts)
    .toSorted()
    .map((name) => readFileSync(join(texts, name), 'utf8'));
}

async function trainAll() {
  const device = createDevice();
  const model = await Model.open(fileURLToPath(new URL('../../../models/needle-8m', import.meta.url)), { device });
  const encoded = await Promise.all(calibrationTexts().map((text) => model.tokenizer.encode(text)));
  const texts = encoded.map((ids) => ids.subarray(0, model.config.maxPositions));
  const calibration = new Calibration();
  const contextTokens = Math.max(...texts.map(({ length }) => length));
  const runner = model.createRunner({ policy: kvPolicy({ store: calibration.store }), sequences: texts.length, contextTokens });
  for (const ids of texts) (await prefill(runner, runner.openSequence(), ids)).dispose();
  for (const book of books) {
    if (existsSync(fileOf(book))) continue;
    await saveCodebooks(fileOf(book), await calibration.train({ model: await model.fingerprint(), ...book }));
    console.error(fileOf(book));
  }
  runner.dispose();
  model.dispose();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) await trainAll();
