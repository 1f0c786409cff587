// Times decode steps of many sequences at once. Reads commands from standard input, one a line, and answers each with a
// line of JSON, so that torch-batched-step.py can take turns with it:
//   ./node tools/gpu/batch-bench.mjs MODEL [--device cuda]
//   step LENGTHS STEPS     LENGTHS: 64x4096 or 63x1024,1x131072; answers { milliseconds: [one for each step] }
import { createInterface } from 'node:readline';
import { parseArgs } from 'node:util';
import { Model } from '../../packages/model/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { readPrompts, timeSteps } from './step-times.mjs';

const maxBatchRows = 8192;
const warmUp = 4;
const { values, positionals } = parseArgs({
  options: { device: { type: 'string', default: 'cuda' } },
  allowPositionals: true,
});
const device = createDevice({ kind: values.device });
const model = await Model.open(positionals[0], { device });

/** `63x1024,1x131072` as the length of each sequence. */
function parseLengths(text) {
  return text.split(',').flatMap((part) => {
    const [count, length] = part.split('x').map(Number);
    return new Array(count).fill(length);
  });
}

/** The sequences of the last command: one of the same lengths goes on with them, and prompts are read once. */
let open = { lengthsText: '', left: 0, runner: undefined, sequences: [] };

async function openSequences(lengthsText, steps) {
  open.runner?.dispose();
  const lengths = parseLengths(lengthsText);
  const left = 4 * (steps + warmUp);
  const runner = model.createRunner({
    sequences: lengths.length,
    contextTokens: Math.max(...lengths) + left,
    cacheTokens: lengths.reduce((sum, length) => sum + Math.ceil((length + left) / 64) * 64, 0),
    maxBatchRows,
  });
  open = { lengthsText, left, runner, sequences: lengths.map(() => runner.openSequence()) };
  await readPrompts(runner, open.sequences, lengths);
}

async function step(lengthsText, steps) {
  if (lengthsText !== open.lengthsText || open.left < steps + warmUp) await openSequences(lengthsText, steps);
  open.left -= steps + warmUp;
  return { milliseconds: await timeSteps(open.runner, open.sequences, steps, { warmUp }) };
}

console.log(JSON.stringify({ ready: device.name }));
for await (const line of createInterface({ input: process.stdin })) {
  const [command, lengths, steps] = line.trim().split(' ');
  if (command !== 'step') break;
  console.log(JSON.stringify(await step(lengths, Number(steps))));
}
open.runner?.dispose();
model.dispose();
