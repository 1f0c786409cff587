// Later tokens of the small model over a cache of which each answer reads 2,048 tokens a kv head, beside our dense cache, in
// turn: docs/benchmarks/serving-cpu.json. Needs built packages.
//
//   node tools/bench/block-cache.mjs [--prompt 16000] [--tokens 32] [--rounds 8] [--threads 2] [--policies sparse-2048,offload-1/4] [--print]
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { generateTokens, Model, prefill } from '../../packages/model/dist/index.js';
import { openPolicy } from '../../packages/policies/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { keepRows, stamp, summarise } from './results.mjs';

const { values: options } = parseArgs({
  options: {
    prompt: { type: 'string', default: '16000' },
    tokens: { type: 'string', default: '32' },
    rounds: { type: 'string', default: '8' },
    threads: { type: 'string', default: '2' },
    policies: { type: 'string', default: 'sparse-2048,offload-1/4' },
    print: { type: 'boolean', default: false },
  },
});
const [promptTokens, tokens, rounds, threads] = [options.prompt, options.tokens, options.rounds, options.threads].map(Number);
const contextTokens = promptTokens + (rounds + 1) * (tokens + 1) + 1;
// Fixed, scattered ids above the special ones.
const prompt = Array.from({ length: promptTokens }, (_, index) => 300 + ((index * 7919 + (index >> 3) * 104_729) % 3796));
const model = await Model.open(fileURLToPath(new URL('../../models/needle-8m', import.meta.url)), { device: createDevice({ threads }) });

async function open(name) {
  const policy = await openPolicy(name, model, { contextTokens });
  const runner = model.createRunner({ policy: policy.policy, contextTokens });
  const sequence = runner.openSequence();
  (await prefill(runner, sequence, prompt)).dispose();
  return { name, runner, sequence, milliseconds: [] };
}

const caches = [];
for (const name of ['dense', ...options.policies.split(',')]) caches.push(await open(name));
for (let round = 0; round <= rounds; round++) {
  for (const { runner, sequence, milliseconds } of caches) {
    let [sum, count] = [0, 0];
    // The first of them follows a prompt of one token.
    for await (const each of generateTokens(runner, [300 + round], { sequence, maxTokens: tokens + 1, endIds: [] })) {
      if (count++ > 0) sum += each.milliseconds;
    }
    if (round > 0) milliseconds.push(sum / tokens);
  }
}
const [dense, ...others] = caches.map(({ name, runner, sequence, milliseconds }) => {
  const demand = runner.demand(sequence);
  return { name, times: summarise(milliseconds), demand, kvBytes: runner.kvBytesOf(sequence) };
});
for (const { name, times, demand, kvBytes } of others) {
  const row = {
    measure: `a later token, ${name}, ${promptTokens} tokens of prompt, ${threads} thread${threads > 1 ? 's' : ''}`,
    shapes: 'needle-8m: 8 layers, 8/2 heads of 64',
    device: 'cpu',
    kind: 'measured',
    unit: 'ms',
    better: 'lower',
    result: times,
    reference: { name: 'ours, dense cache', ...dense.times },
    target: { ratio: 2 },
    kvBytes,
    ...(demand && { demand }),
    instructionSet: model.device.instructionSet,
    threads,
    ...stamp(),
  };
  if (!options.print) keepRows('serving-cpu', 'Answers that read some blocks of a long text, on the CPU', [row]);
  console.log(`${row.measure}: ${times.median.toFixed(3)} ms, dense ${dense.times.median.toFixed(3)} ms, ${(dense.times.median / times.median).toFixed(2)}x`);
}
for (const { runner } of caches) runner.dispose();
model.dispose();
