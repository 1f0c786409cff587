// CPU kernels that are bound by memory beside a plain read of it: docs/benchmarks/cpu-bandwidth.json, one row for each
// kernel, shape and processor. Needs the native build (npm run build) and g++.
//
//   node tools/bench/cpu-bandwidth/run.mjs [--samples 9] [--threads 1] [--set avx2]
//
// --set: of an instruction set that is not the processor's widest, as an older processor runs.
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { cacheFolder } from '../cache.mjs';
import { keepRows, processor, stamp, summarise } from '../results.mjs';

const TITLE = 'CPU kernels beside a plain read of the same memory';
const ROOT = fileURLToPath(new URL('../../..', import.meta.url));
const LIMITS = join(ROOT, 'tools/bench/attention/machine-limits.cc');
const SOURCE = fileURLToPath(new URL('./cpu-bandwidth.cc', import.meta.url));

function build() {
  const program = join(cacheFolder('programs'), 'cpu-bandwidth');
  // The plain read may use all that this processor has.
  const flags = ['-std=c++17', '-O3', '-march=native', '-pthread', `-I${join(ROOT, 'native')}`];
  execFileSync('g++', [...flags, SOURCE, LIMITS, join(ROOT, 'native/build/libkv_core.a'), '-o', program]);
  return program;
}

function rowOf({ kernel, shape, dtype, threads, set, streams, cache, requests, gigahertz, value, limit }) {
  const giga = (samples) => summarise(samples.map((sample) => sample / 1e9));
  const workers = threads === 1 ? '1 thread' : `${threads} threads`;
  return {
    measure: `${kernel}, ${shape}, ${dtype}, ${workers}, ${values.set === undefined ? '' : `${set} on `}${processor()}`,
    shapes: { kernel, shape, dtype, threads },
    device: 'cpu',
    kind: 'measured',
    unit: 'GB/s',
    better: 'higher',
    chart: false,
    result: giga(value),
    reference: { name: 'a plain read of the same memory', ...giga(limit) },
    target: { ratio: 0.9 },
    memoryStreams: streams,
    prefetchCache: cache,
    prefetchRequests: requests,
    instructionSet: set,
    gigahertz,
    ...stamp(),
  };
}

const { values } = parseArgs({
  options: { samples: { type: 'string', default: '9' }, threads: { type: 'string', default: '1' }, set: { type: 'string' } },
});
const cores = Array.from({ length: Number(values.threads) }, (_, core) => core).join(',');
const pinned = ['-c', cores, build(), values.samples, values.threads, ...(values.set === undefined ? [] : [values.set])];
const rows = execFileSync('taskset', pinned, { encoding: 'utf8' })
  .trim()
  .split('\n')
  .map((line) => rowOf(JSON.parse(line)));
for (const { measure, result, reference } of rows) {
  const share = (result.median / reference.median).toFixed(2);
  console.log(`${measure}: ${result.median.toFixed(1)} of ${reference.median.toFixed(1)} GB/s, ${share}`);
}
keepRows('cpu-bandwidth', TITLE, rows);
