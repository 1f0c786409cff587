// What an engine takes beside its kernels: the JavaScript thread, the device's memory while a long prompt is read, tokens/s where
// all blocks fit the device.
import { readFileSync } from 'node:fs';
import { clearInterval, setInterval } from 'node:timers';
import { createEngine } from '../../packages/serve-scheduler/dist/index.js';
import { heldBytes, twoMemories } from './serving-rows.mjs';

const idsOf = (model, tokens, seed) => Int32Array.from({ length: tokens }, (_, i) => (i * 7919 + seed * 104729 + 13) % model.config.vocabularySize);

async function drain(answer, onToken = () => undefined) {
  for await (const token of answer) onToken(token);
}

/** Processor time of the JavaScript thread in ms. */
function scriptTime() {
  const [nanoseconds] = readFileSync(`/proc/self/task/${process.pid}/schedstat`, 'utf8').split(' ');
  return Number(nanoseconds) / 1e6;
}

/** The JavaScript thread's ms a step while so many answers are under way. */
async function scriptOfSteps(model, policy, sequences, { tokens, contextTokens, maxBatchRows }) {
  const engine = createEngine(model, { policy, sequences, contextTokens, maxBatchRows });
  let underWay = 0;
  let first, last;
  const count = () => (underWay += 1) === sequences && (first = { at: scriptTime(), steps: engine.stats.steps, clock: performance.now() });
  const left = () => (last ??= { at: scriptTime(), steps: engine.stats.steps, clock: performance.now() });
  await Promise.all(
    Array.from({ length: sequences }, async (_, index) => {
      let isFirst = true;
      await drain(engine.generateTokens(idsOf(model, 512, index), { maxTokens: tokens, endIds: [] }), () => {
        if (isFirst) count();
        isFirst = false;
      });
      left();
    }),
  );
  await engine.close();
  const steps = last.steps - first.steps;
  return { script: (last.at - first.at) / steps, step: (last.clock - first.clock) / steps };
}

export async function answers({ model, sizes, row }) {
  const { answers: most, rows: maxBatchRows, rounds } = sizes;
  const options = { tokens: 192, contextTokens: 1024, maxBatchRows };
  const times = { most: [], one: [], dense: [] };
  for (let round = 0; round <= rounds; round += 1) {
    const measured = { dense: await scriptOfSteps(model, undefined, most, options) };
    for (const [name, sequences] of [['most', most], ['one', 1]]) {
      const two = await twoMemories(model, { sequences, ...options, share: 1 });
      measured[name] = await scriptOfSteps(model, two.policy, sequences, options);
      two.close();
    }
    console.error(JSON.stringify(measured));
    if (round > 0) for (const name of Object.keys(times)) times[name].push(measured[name].script);
  }
  const what = 'processor time of the JavaScript thread, a step of';
  row({ measure: `${what} ${most} answers over two memories`, samples: times.most, reference: { name: 'a step of one answer', samples: times.one }, target: { atMost: 0.8 }, chart: false });
  row({ measure: `${what} ${most} answers over a dense cache`, samples: times.dense, chart: false });
}

/** The device's bytes while a long prompt is read, beside those before. */
export async function reading({ model, sizes, row }) {
  const { long, rows: maxBatchRows } = sizes;
  const contextTokens = long + 64;
  const two = await twoMemories(model, { sequences: 1, contextTokens, maxBatchRows, answers: 1 });
  const before = heldBytes(model);
  const engine = createEngine(model, { policy: two.policy, sequences: 1, contextTokens, maxBatchRows, layerSegments: true });
  const made = heldBytes(model);
  // Brings kernels and their working memory in place.
  await drain(engine.generateTokens(idsOf(model, 2 * maxBatchRows, 1), { maxTokens: 2, endIds: [] }));
  const idle = heldBytes(model);
  let most = idle;
  const sampling = setInterval(() => (most = Math.max(most, heldBytes(model))), 1);
  const started = performance.now();
  await drain(engine.generateTokens(idsOf(model, long, 2), { maxTokens: 1, endIds: [] }));
  clearInterval(sampling);
  console.error(`${long} tokens read in ${((performance.now() - started) / 1000).toFixed(1)} s; engine ${made - before} bytes, with working memory ${idle - before}, at most ${most - before}`);
  const { kvHeads, headDim, layers } = model.config;
  const ofLayer = 4 * long * kvHeads * headDim;
  const gibibytes = (bytes) => [bytes / 2 ** 30];
  row({
    measure: `device bytes of a prompt of ${long} tokens in reading: its rows and one layer`,
    samples: gibibytes(most - idle + ofLayer),
    reference: { name: 'all layers, chunks', samples: gibibytes(layers * ofLayer) },
    ...{ unit: 'GiB', target: { atMost: 1.7 }, metadata: (layers * ofLayer) / 32 / 2 ** 30 },
  });
  await engine.close();
  two.close();
}

/** Tokens/s of requests all of whose blocks fit the device, where a part of the cache does. */
export async function fit({ model, sizes, row }) {
  const { sequences: load, rows: maxBatchRows, rounds } = sizes;
  const [promptTokens, tokens] = [4096, 256];
  const contextTokens = promptTokens + tokens + 64;
  // The cache is for half as many requests again: three quarters of it hold all blocks of this load.
  const sequences = 1.5 * load;
  const rates = { dense: [], all: [], most: [] };
  for (let round = 0; round <= rounds; round += 1) {
    for (const [name, share] of [['dense', undefined], ['all', 1], ['most', 0.75]]) {
      const two = share === undefined ? undefined : await twoMemories(model, { sequences, contextTokens, maxBatchRows, share });
      const engine = createEngine(model, { policy: two?.policy, sequences, contextTokens, maxBatchRows });
      const started = performance.now();
      const asked = round === 0 ? 16 : tokens;
      await Promise.all(Array.from({ length: load }, (_, index) => drain(engine.generateTokens(idsOf(model, promptTokens, index), { maxTokens: asked, endIds: [] }))));
      const seconds = (performance.now() - started) / 1000;
      console.error(`${name}: ${seconds.toFixed(2)} s, ${JSON.stringify(engine.stats)}`);
      if (round > 0) rates[name].push((load * tokens) / seconds);
      await engine.close();
      two?.close();
    }
  }
  const what = `${load} requests of ${promptTokens} tokens that fit a cache of 75 % of all blocks`;
  const tokensPerSecond = { unit: 'tokens/s', better: 'higher' };
  row({ measure: what, samples: rates.most, reference: { name: 'all blocks on the device', samples: rates.all }, ...tokensPerSecond, target: { ratio: 0.98 } });
  row({ measure: `${what}, beside dense answers`, samples: rates.most, reference: { name: 'ours, dense cache', samples: rates.dense }, ...tokensPerSecond, chart: false });
}
