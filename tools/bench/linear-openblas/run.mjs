// Linear layers: many rows against OpenBLAS sgemm, one row against reading the weights:
// docs/benchmarks/linear.json. Needs the native build (npm run build) and g++.
//
//   node tools/bench/linear-openblas/run.mjs [--samples 9]
import { execFileSync } from 'node:child_process';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { cacheFolder } from '../cache.mjs';
import { openblasEnvironment, openblasFlags } from '../peers/openblas.mjs';
import { keepRows, stamp, summarise } from '../results.mjs';

const TITLE = 'Linear layers on the CPU';
const ROOT = fileURLToPath(new URL('../../..', import.meta.url));
const SOURCE = fileURLToPath(new URL('./linear-openblas.cc', import.meta.url));
const DTYPES = ['f32', 'f16', 'bf16'];
const MANY_ROWS = [
  [768, 768],
  [768, 256],
  [768, 2048],
  [2048, 768],
  [256, 704],
  [768, 4096],
].map(([inputs, outputs]) => ({ tokens: 512, inputs, outputs }));
const ONE_ROW = [
  [768, 768],
  [768, 2048],
  [2048, 768],
].map(([inputs, outputs]) => ({ tokens: 1, inputs, outputs }));

function build() {
  const program = join(cacheFolder('programs'), 'linear-openblas');
  const library = join(ROOT, 'native/build/libkv_core.a');
  const flags = ['-std=c++17', '-O3', '-march=native', '-pthread', `-I${join(ROOT, 'native')}`];
  execFileSync('g++', [...flags, SOURCE, library, ...openblasFlags(), '-lopenblas', '-o', program]);
  return program;
}

function measure(program, { tokens, inputs, outputs, dtype, threads }, samples) {
  const cores = Array.from({ length: threads }, (_, core) => core).join(',');
  const shape = [tokens, inputs, outputs, dtype, threads, samples].map(String);
  const env = { ...process.env, ...openblasEnvironment(threads) };
  return JSON.parse(execFileSync('taskset', ['-c', cores, program, ...shape], { encoding: 'utf8', env }));
}

/** A row; `amount` is the work of one call in the thousands of millions that `unit` counts a second. */
function row(setting, measured, amount, unit, reference) {
  const { tokens, inputs, outputs, dtype, threads } = setting;
  const workers = threads === 1 ? '1 thread' : `${threads} threads`;
  const rate = (times) => summarise(times.map((milliseconds) => amount / (milliseconds / 1e3)));
  const weightBytes = inputs * outputs * (dtype === 'f32' ? 4 : 2);
  return {
    measure: `linear, ${tokens} × ${inputs} → ${outputs}, ${dtype} weights, ${workers}`,
    shapes: setting,
    device: 'cpu',
    kind: 'measured',
    unit,
    better: 'higher',
    result: rate(measured.ours),
    reference: { name: reference, ...rate(measured.reference) },
    milliseconds: summarise(measured.ours),
    referenceMilliseconds: summarise(measured.reference),
    bytes: weightBytes + 4 * tokens * (inputs + outputs),
    flops: 2 * tokens * inputs * outputs,
    gigahertz: measured.gigahertz,
    instructionSet: measured.instructionSet,
    ...stamp(),
  };
}

function manyRows(setting, measured) {
  const version = /OpenBLAS [\d.]+/.exec(measured.library)[0];
  const gigaflop = (2 * setting.tokens * setting.inputs * setting.outputs) / 1e9;
  const reference = `${version} sgemm, ${measured.kernels} kernels, f32 weights`;
  return { ...row(setting, measured, gigaflop, 'GFLOP/s', reference), target: { ratio: 0.8 } };
}

function oneRow(setting, measured) {
  const gigabytes = (setting.inputs * setting.outputs * (setting.dtype === 'f32' ? 4 : 2)) / 1e9;
  return row(setting, measured, gigabytes, 'GB/s', 'a loop that only reads the weights');
}

const { values } = parseArgs({ options: { samples: { type: 'string', default: '9' } } });
const program = build();
for (const threads of [1, 2]) {
  for (const shape of [...MANY_ROWS, ...ONE_ROW]) {
    const rows = DTYPES.map((dtype) => {
      const setting = { ...shape, dtype, threads };
      const measured = measure(program, setting, Number(values.samples));
      return shape.tokens === 1 ? oneRow(setting, measured) : manyRows(setting, measured);
    });
    keepRows('linear', TITLE, rows);
    for (const { measure: name, result, reference, unit } of rows) {
      const figures = [result, reference].map(({ median }) => median.toFixed(1)).join(' against ');
      console.log(`${name}: ${figures} ${unit}`);
    }
  }
}
