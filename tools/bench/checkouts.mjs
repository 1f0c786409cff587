// Two built checkouts in turn, each in a process of its own: attention over every kind of cache, and a whole model of 125M.
// Shows whether a change has made anything slower. Prints rows, one a line, for keep.mjs.
//
//   node tools/bench/checkouts.mjs BEFORE AFTER --name 'commit d0ea14b' [--threads 1,2] [--rounds 9] > rows.jsonl
import { spawn } from 'node:child_process';
import { resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { benchmarkModel } from './cache.mjs';
import { processor, stamp, summarise } from './results.mjs';

const worker = fileURLToPath(new URL('./checkouts-worker.mjs', import.meta.url));

/** A process with the packages of one checkout. It answers each name of a work with its milliseconds. */
function start(checkout, threads, directories) {
  const options = [resolve(checkout), threads, directories].map((option) => JSON.stringify(option));
  const child = spawn(process.execPath, [worker, ...options], { stdio: ['pipe', 'pipe', 'inherit'] });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const read = async () => JSON.parse((await lines.next()).value);
  const time = async (name) => {
    child.stdin.write(`${name}\n`);
    return await read();
  };
  return { names: read, time, end: () => child.stdin.end() };
}

const { values, positionals } = parseArgs({
  options: { name: { type: 'string' }, threads: { type: 'string', default: '1,2' }, rounds: { type: 'string', default: '9' } },
  allowPositionals: true,
});
const directories = Object.fromEntries(['f16', 'bf16'].map((dtype) => [dtype, benchmarkModel('125M', dtype).directory]));
for (const threads of values.threads.split(',').map(Number)) {
  const [before, after] = positionals.map((checkout) => start(checkout, threads, directories));
  const names = await before.names();
  await after.names();
  for (const name of names) {
    const sides = [before, after].map((checkout) => ({ checkout, times: [] }));
    for (let round = -1; round < Number(values.rounds); round++) {
      for (const { checkout, times } of round % 2 === 0 ? sides : sides.toReversed()) {
        const milliseconds = await checkout.time(name);
        if (round >= 0) times.push(milliseconds);
      }
    }
    const [earlier, later] = sides.map(({ times }) => summarise(times));
    const row = {
      measure: `${name}, ${threads === 1 ? '1 thread' : `${threads} threads`}, ${processor()}`,
      shapes: { threads },
      device: 'cpu',
      kind: 'measured',
      unit: 'ms',
      better: 'lower',
      chart: false,
      result: later,
      reference: { name: values.name, ...earlier },
      target: { ratio: 0.99 },
      ...stamp(),
    };
    console.log(JSON.stringify(row));
  }
  before.end();
  after.end();
}
