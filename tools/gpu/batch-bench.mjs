// Times decode steps of many sequences at once. Reads commands from standard input, one a line, and answers each with a
// line of JSON, so that torch-batched-step.py can take turns with it:
//   ./node tools/gpu/batch-bench.mjs MODEL [--device cuda]
//   step LENGTHS STEPS     LENGTHS: 64x4096 or 63x1024,1x131072; answers { milliseconds: [one for each step] }
import { createInterface } from 'node:readline';
import { parseArgs } from 'node:util';
import { Model } from '../../packages/model/dist/index.js';
import { createDevice, sample } from '../../packages/sparse-core/dist/index.js';

const maxBatchRows = 8192;
const { values, positionals } = parseArgs({
  options: { device: { type: 'string', default: 'cuda' } },
  allowPositionals: true,
});
const device = createDevice({ kind: values.device });
const model = await Model.open(positionals[0], { device });
const { vocabularySize } = model.config;

/** `63x1024,1x131072` as the length of each sequence. */
function parseLengths(text) {
  return text.split(',').flatMap((part) => {
    const [count, length] = part.split('x').map(Number);
    return new Array(count).fill(length);
  });
}

/** Reads a prompt of arbitrary tokens into each sequence. */
async function openSequences(runner, lengths) {
  const sequences = lengths.map(() => runner.openSequence());
  for (const [index, length] of lengths.entries()) {
    for (let first = 0; first < length; first += maxBatchRows) {
      const rows = Math.min(maxBatchRows, length - first);
      const ids = Int32Array.from({ length: rows }, (_, i) => ((first + i) * 7919 + index * 104729) % vocabularySize);
      const phase = first + rows === length ? 'prefill-end' : 'prefill';
      (await runner.step([{ sequence: sequences[index], ids, phase }])).dispose();
    }
  }
  return sequences;
}

/** Steps of one token of each sequence, chosen on the device; each step is enqueued before the last one is done. */
async function timeSteps(runner, sequences, steps) {
  const { stream } = runner;
  const rows = sequences.length;
  const ids = device.tensor('i32', ['row'], [rows], Int32Array.from({ length: rows }, (_, i) => i + 2));
  const idOf = sequences.map((_, index) => ids.slice('row', index, index + 1).view(['token'], [1]));
  const settings = sequences.map(() => ({ temperature: 0 }));
  const warmUp = 4;
  const times = [];
  const ended = [];
  for (let step = 0; step < warmUp + steps; step += 1) {
    const logits = await runner.step(
      sequences.map((sequence, index) => ({ sequence, ids: idOf[index], phase: 'decode' })),
    );
    sample(stream, { logits, settings, steps: sequences.map(() => step), output: ids });
    logits.dispose();
    ended.push(ids.read().then(() => times.push(performance.now())));
    // One step ahead of the device, as an engine is.
    await ended[step - 1];
  }
  await Promise.all(ended);
  ids.dispose();
  return times.slice(warmUp).map((time, index) => time - times[warmUp + index - 1]);
}

async function step(lengthsText, steps) {
  const lengths = parseLengths(lengthsText);
  const runner = model.createRunner({
    sequences: lengths.length,
    contextTokens: Math.max(...lengths) + steps + 8,
    cacheTokens: lengths.reduce((sum, length) => sum + Math.ceil((length + steps + 8) / 64) * 64, 0),
    maxBatchRows,
  });
  try {
    const sequences = await openSequences(runner, lengths);
    return { milliseconds: await timeSteps(runner, sequences, steps) };
  } finally {
    runner.dispose();
  }
}

console.log(JSON.stringify({ ready: device.name }));
for await (const line of createInterface({ input: process.stdin })) {
  const [command, lengths, steps] = line.trim().split(' ');
  if (command !== 'step') break;
  console.log(JSON.stringify(await step(lengths, Number(steps))));
}
model.dispose();
