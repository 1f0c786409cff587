// Attention kernels against what the machine can do at most: docs/benchmarks/attention-cpu.json.
//
//   node tools/bench/attention/run.mjs [--samples 5]
//
// Prefill is held against the peak of fused multiply-adds, decode (whose layers together are several times the
// last-level cache) against the bandwidth of reading; both limits are measured between the samples.
import { execFileSync } from 'node:child_process';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { cacheFolder } from '../cache.mjs';
import { keepRows, stamp, summarise } from '../results.mjs';

const TITLE = 'Attention kernels on the CPU against the limits of the machine';
const SOURCE = fileURLToPath(new URL('.', import.meta.url));
const UNITS = {
  'prefill-attention': { unit: 'GFLOP/s', reference: 'peak of f32 fused multiply-adds', target: { ratio: 0.6 } },
  'decode-attention': { unit: 'GB/s', reference: 'bandwidth of reading memory' },
};

function build() {
  const folder = join(cacheFolder('attention'), 'build');
  mkdirSync(folder, { recursive: true });
  execFileSync('cmake', ['-S', SOURCE, '-B', folder], { stdio: ['ignore', 'ignore', 'inherit'] });
  execFileSync('cmake', ['--build', folder, '--target', 'attention-speed'], { stdio: ['ignore', 'ignore', 'inherit'] });
  return join(folder, 'attention-speed');
}

function rowOf({ operation, heads: [queryHeads, kvHeads, headDim], context, threads, value, limit }) {
  const { unit, reference, target } = UNITS[operation];
  const shape = `${queryHeads}/${kvHeads} heads of ${headDim}, ${context} tokens`;
  const giga = (samples) => summarise(samples.map((sample) => sample / 1e9));
  return {
    measure: `${operation}, ${shape}, ${threads} thread${threads > 1 ? 's' : ''}`,
    shapes: `${shape}, f16 cache, ${operation === 'prefill-attention' ? 'causal, one prompt' : 'one sequence'}`,
    device: 'cpu',
    kind: 'measured',
    unit,
    better: 'higher',
    result: giga(value),
    reference: { name: reference, ...giga(limit) },
    ...(target !== undefined && context >= 4096 ? { target } : {}),
    threads,
    ...stamp(),
  };
}

const { values } = parseArgs({ options: { samples: { type: 'string', default: '5' } } });
const output = execFileSync(build(), [values.samples], { encoding: 'utf8' });
const rows = output.trim().split('\n').map((line) => rowOf(JSON.parse(line)));
for (const { measure, result, reference, unit } of rows) {
  const share = Math.round((100 * result.median) / reference.median);
  console.log(`${measure}: ${result.median.toFixed(1)} ${unit}, ${share} % of ${reference.median.toFixed(1)}`);
}
keepRows('attention-cpu', TITLE, rows);
