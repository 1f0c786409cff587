// Serves one trace with an engine, so that what `kv simulate` says can be held against it. Prints rows for docs/benchmarks, one a
// line, and what else a run told on the other stream.
// In the test kit:
//   ./node tools/make-random-model.mjs --output MODEL --layers 8 --hidden 4096 --query-heads 32 --kv-heads 32 --head-dim 128 \
//     --intermediate 11008 --vocabulary 32000
//   ./node tools/gpu/serving-anchors.mjs MODEL packages/serve-scheduler/test-data/anchors.jsonl [--systems dense,+WC,+LP] [--device-gib 5.5] [--host-tokens 131072]
//     [--sequences 16] [--context 16384] [--rows 2048] [--speed 1] [--device cuda]
// A trace is as Mooncake publishes them; `--speed 2` brings its requests in half the time.
import { readFileSync } from 'node:fs';
import { clearInterval, setInterval } from 'node:timers';
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { hierarchicalHostBytes, hierarchicalStore } from '../../packages/hierarchical-kv/dist/index.js';
import { Model } from '../../packages/model/dist/index.js';
import { createEngine, readTrace } from '../../packages/serve-scheduler/dist/index.js';
import { createDevice, hostPool, kvPolicy } from '../../packages/sparse-core/dist/index.js';
import { rowMaker } from './serving-rows.mjs';

const { values, positionals } = parseArgs({
  options: {
    systems: { type: 'string', default: 'dense,+WC,+LP' },
    'device-gib': { type: 'string', default: '5.5' },
    'host-tokens': { type: 'string', default: '131072' },
    sequences: { type: 'string', default: '16' },
    context: { type: 'string', default: '16384' },
    rows: { type: 'string', default: '2048' },
    speed: { type: 'string', default: '1' },
    device: { type: 'string', default: 'cuda' },
  },
  allowPositionals: true,
});
const [sequences, contextTokens, maxBatchRows, hostTokens] = [values.sequences, values.context, values.rows, values['host-tokens']].map(Number);
const deviceBytes = Math.floor(Number(values['device-gib']) * 2 ** 30);
const device = createDevice({ kind: values.device });
const model = await Model.open(positionals[0], { device });
const trace = readTrace(readFileSync(positionals[1], 'utf8'));
const { layers, kvHeads, headDim, vocabularySize } = model.config;
const tokenBytes = layers * kvHeads * headDim * 4;

const capacity = { device, slots: sequences, tokensPerSlot: contextTokens, tokens: hostTokens, batchRows: maxBatchRows };
const bytes = hierarchicalHostBytes({}, Array.from({ length: layers }, (_, index) => ({ ...model.config, index })), capacity);
const pool = await hostPool(device, { bytes });

/** The same bytes of the device, and the same tokens of prompts in a step. */
function engineOf(system) {
  const shared = { sequences, contextTokens, maxBatchRows, maxInjectTokens: maxBatchRows * layers };
  if (system === 'dense') return createEngine(model, { ...shared, cacheTokens: Math.floor(deviceBytes / tokenBytes) });
  const policy = kvPolicy({ store: hierarchicalStore({ deviceBytes, hostPool: pool }) });
  return createEngine(model, { ...shared, policy, cacheTokens: hostTokens, layerSegments: system === '+LP' });
}

/** What the runner's sequences read of the cache, the newest counts of each. */
function watch({ runner }) {
  const demands = new Map();
  const open = runner.openSequence.bind(runner);
  runner.openSequence = (...given) => {
    const sequence = open(...given);
    demands.set(sequence, undefined);
    return sequence;
  };
  const ask = () => {
    for (const sequence of demands.keys()) if (!sequence.disposed) demands.set(sequence, runner.demand(sequence) ?? demands.get(sequence));
  };
  const asking = setInterval(ask, 25);
  return () => {
    clearInterval(asking);
    return [...demands.values()].filter((each) => each !== undefined);
  };
}

const idsOf = (tokens, seed) => Int32Array.from({ length: tokens }, (_, i) => (i * 7919 + seed * 104_729 + 13) % vocabularySize);
const mean = (numbers) => numbers.reduce((sum, each) => sum + each, 0) / Math.max(1, numbers.length);

async function serve(system, requests, speed) {
  const engine = engineOf(system);
  const { residency } = engine.runner;
  const demandsOf = watch(engine);
  const started = performance.now();
  const times = await Promise.all(
    requests.map(async ({ milliseconds, promptTokens, maxTokens }, index) => {
      const prompt = idsOf(promptTokens, index);
      const due = started + milliseconds / speed;
      await setTimeout(Math.max(0, due - performance.now()));
      const arrival = performance.now();
      const tokens = [];
      const answer = engine.generateTokens(prompt, { maxTokens, endIds: [] });
      while (!(await answer.next()).done) tokens.push(performance.now());
      return { arrival, tokens };
    }),
  );
  const demands = demandsOf();
  const { steps, split, restarts } = engine.stats;
  await engine.close();
  const gaps = times.flatMap(({ tokens }) => tokens.slice(1).map((time, index) => time - tokens[index]));
  gaps.sort((one, other) => one - other);
  const tokens = times.reduce((sum, each) => sum + each.tokens.length, 0);
  const [first, last] = [Math.min(...times.map(({ arrival }) => arrival)), Math.max(...times.map((each) => each.tokens.at(-1)))];
  const sum = (count) => demands.reduce((total, each) => total + each[count], 0);
  return {
    ...{ system, speed, requests: requests.length },
    firstToken: mean(times.map((each) => each.tokens[0] - each.arrival)),
    betweenTokens: mean(gaps),
    betweenTokens50: gaps[Math.floor(0.5 * (gaps.length - 1))] ?? 0,
    betweenTokens99: gaps[Math.floor(0.99 * (gaps.length - 1))] ?? 0,
    tokensPerSecond: (1000 * tokens) / (last - first),
    loadsPerStep: sum('misses') / steps,
    ...{ steps, split, restarts, residency },
    demand: { hits: sum('hits'), misses: sum('misses'), workingSet: mean(demands.map((each) => each.workingSet)), steps: mean(demands.map((each) => each.step)) },
  };
}

const makeRow = rowMaker(model);
/** The shares of what an engine does that the simulator is held against. */
function print({ system, speed, requests, ...result }) {
  console.error(JSON.stringify({ system, speed, requests, ...result }));
  const row = (what, sample, others) => makeRow({ measure: `${system}, ${requests} requests, ${speed} times as fast as the trace: ${what}`, samples: [sample], chart: false, ...others });
  row('mean time to the first token', result.firstToken);
  row('mean time between tokens', result.betweenTokens);
  row('time between tokens, P99', result.betweenTokens99);
  row('tokens', result.tokensPerSecond, { unit: 'tokens/s', better: 'higher' });
}
const systems = values.systems.split(',');
for (const system of systems) await serve(system, [{ milliseconds: 0, promptTokens: 1024, maxTokens: 8 }], 1);
// One request alone says how much what it reads changes from step to step.
const alone = { milliseconds: 0, promptTokens: Math.floor(contextTokens / 2), maxTokens: 128 };
if (systems.some((system) => system !== 'dense')) print(await serve('+LP', [alone], 1));
for (const speed of values.speed.split(',').map(Number)) for (const system of systems) print(await serve(system, trace, speed));
pool.dispose();
model.dispose();
