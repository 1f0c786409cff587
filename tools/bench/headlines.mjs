import { fileURLToPath } from 'node:url';
import { ratioChart } from './chart.mjs';
import { measuredTable, ratioOf, rowOf, withMeasured } from './measured-tables.mjs';

export const HEADLINE_CHART = fileURLToPath(new URL('../../docs/pictures/headlines.svg', import.meta.url));

const ZEN_5 = 'AMD EPYC, family 26, model 2, 2.6 GHz';
const XEON = 'Intel(R) Xeon(R) Processor, family 6, model 207, 2.1 GHz';

// The rows that the README shows: a file of docs/benchmarks, a measure in it, what it says to a stranger, and, if the README's
// picture has it, its label there.
const GROUPS = [
  {
    title: 'To install, and to start',
    rows: [
      ['install', 'npm install, packages', '`npm install @kv/model`: packages'],
      ['install', 'npm install, space on disk', '`npm install @kv/model`: space on disk'],
      ['install', 'npm install, time', '`npm install @kv/model`: time, nothing in the cache'],
      ['install', 'a new process to its first token, needle-8m, 2 threads', 'CPU: a new process to its first token, the small model', 'CPU: new process to first token, the small model'],
    ],
  },
  {
    title: 'On a CPU: an AMD EPYC (Zen 5) where no other is named',
    rows: [
      ['foundation-cpu', `prefill, 1.1B, 512 tokens of prompt, f16, 2 threads, ${ZEN_5}`, '1.1B model in f16, prompt of 512 tokens, 2 threads', 'CPU: 1.1B model, prompt of 512 tokens'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, f16, 1 thread, ${ZEN_5}`, '1.1B model in f16, answer, 1 thread', 'CPU: 1.1B model, answer, 1 thread'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, f16, 2 threads, ${ZEN_5}`, '1.1B model in f16, answer, 2 threads', 'CPU: 1.1B model, answer, 2 threads'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, bf16, 1 thread, ${ZEN_5}`, '1.1B model in bf16, answer, 1 thread'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, bf16, 2 threads, ${ZEN_5}`, '1.1B model in bf16, answer, 2 threads'],
      ['foundation-cpu', `prefill, 1.1B, 4096 tokens of prompt, bf16, 16 threads, ${XEON}`, '1.1B model in bf16, prompt of 4,096 tokens, Intel Xeon with AMX, 16 threads', 'CPU: 1.1B model, prompt of 4,096, 16-core Xeon'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, bf16, 16 threads, ${XEON}`, '1.1B model in bf16, answer, Intel Xeon with AMX, 16 threads', 'CPU: 1.1B model, answer, 16-core Xeon'],
      ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, f16, 16 threads, ${XEON}`, '1.1B model in f16, answer, Intel Xeon with AMX, 16 threads'],
      ['linear', 'linear, 512 × 768 → 2048, f32 weights, 2 threads', 'linear layer, 512 rows, 768 → 2,048, 2 threads'],
      ['skeleton-cpu', 'prompt of 16384 tokens, 2 threads, clustered at 1/10', 'small model, prompt of 16,384 tokens over a tenth of its blocks'],
      ['serving-cpu', 'a later token, offload-1/4, 16000 tokens of prompt, 2 threads', 'small model, a later token behind 16,000, a cache over two memories'],
    ],
  },
  {
    title: 'Attention on an H200',
    rows: [
      ['attention-h200', 'prefill 8x32768', 'prefill, 8 prompts of 32K tokens', 'H200: prefill attention, 8 prompts of 32K'],
      ['attention-h200', 'prefill 1x131072', 'prefill, one prompt of 128K'],
      ['skeleton-h200', '128K, 97 % sparse: estimate, selection and attention', 'prefill, 128K over 3 % of its blocks, the estimate included'],
      ['block-sparse-h200', 'block-sparse attention, random 3 %', 'prefill, 128K over given lists of 3 % of its blocks', 'H200: attention of 128K over lists of 3 %'],
      ['attention-h200', 'decode 8x32768, blocks of prompts', 'decode, 8 sequences of 32K, blocks as prompts get them', 'H200: decode attention, 8 of 32K, dense'],
      ['attention-h200', 'decode 8x32768', 'decode, 8 sequences of 32K, blocks in random order'],
      ['attention-h200', 'decode 1x131072', 'decode, one sequence of 128K'],
      ['hierasparse-h200', 'decode 8x32768 S_K = S_V = 1', 'decode, 8 sequences of 32K in 2:4 sparse blocks', 'H200: decode attention, 8 of 32K, 2:4 sparse'],
      ['hcattn-h200', 'decode 8x32768, heads of 128, INT8', 'decode, 8 sequences of 32K in codes of 8 bits', 'H200: decode attention, 8 of 32K, 8 bits'],
      ['hcattn-h200', 'decode 8x32768, heads of 128, INT4', 'decode, 8 sequences of 32K in codes of 4 bits', 'H200: decode attention, 8 of 32K, 4 bits'],
      ['serving-h200', 'scores, top 64 blocks and plan of a layer, 8 sequences of 128K', 'choosing 64 blocks for each of 8 key/value heads of 8 sequences of 128K, one layer'],
      ['selection-h200', 'HBW-KV, 131072 tokens before the window, capacity 1024', 'choosing 1,024 of 128K tokens, one layer'],
    ],
  },
  {
    title: 'An 8B model on an H200',
    rows: [
      ['skeleton-model-h200', 'first token, 131072 tokens of prompt, f16, skeleton, budget 0.03', 'first token, 128K prompt over 3 % of its blocks', 'H200: 8B model, first token of 128K over 3 %'],
      ['hierasparse-model-h200', 'first token, 32768 tokens of prompt, f16, hierasparse-k1-v1', 'first token, 32K prompt, keys and values 2:4'],
      ['hierasparse-model-h200', 'first token, 163840 tokens of prompt, f16, hierasparse-k1-v1', 'first token, 160K prompt, keys and values 2:4'],
      ['hierasparse-model-h200', 'each later token, 32768 tokens of prompt, f16, hierasparse-v1', 'a later token, 32K prompt, values 2:4'],
      ['hierasparse-model-h200', 'each later token, 163840 tokens of prompt, f16, hierasparse-k1-v1', 'a later token, 160K prompt, keys and values 2:4', 'H200: 8B model, a token behind 160K, 2:4 sparse'],
      ['batched-steps-h200', 'decode step of 1 sequence of 4096 tokens', 'decode step, 1 sequence of 4K', 'H200: 8B model, decode step of 1 sequence'],
      ['batched-steps-h200', 'decode step of 8 sequences of 4096 tokens', 'decode step, 8 sequences of 4K'],
      ['batched-steps-h200', 'decode step of 16 sequences of 4096 tokens', 'decode step, 16 sequences of 4K'],
      ['batched-steps-h200', 'decode step of 32 sequences of 4096 tokens', 'decode step, 32 sequences of 4K', 'H200: 8B model, decode step of 32 sequences'],
      ['batched-steps-h200', 'decode step of 64 sequences of 4096 tokens', 'decode step, 64 sequences of 4K'],
      ['batched-steps-h200', 'decode step of 128 sequences of 4096 tokens', 'decode step, 128 sequences of 4K', 'H200: 8B model, decode step of 128 sequences'],
      ['linear-h200', 'layers of a block, rows: 1', 'linear layers of one block, one row'],
    ],
  },
];

/** The README with the tables between its marks made anew; `files` are those of docs/benchmarks. */
export function withHeadlines(readme, files) {
  const tables = GROUPS.map(({ title, rows }) => `### ${title}\n\n${measuredTable(files, rows)}`);
  return withMeasured(readme, tables.join('\n'));
}

/** A few of those rows as bars. */
export function headlineChart(files) {
  const bars = GROUPS.flatMap(({ rows }) => rows.filter(([, , , label]) => label !== undefined)).map(([name, measure, , label]) => {
    const row = rowOf(files, name, measure);
    return { label, ratio: ratioOf(row), detail: row.reference.name.replace(/ \(.*| \d.*|, .*/, '') };
  });
  return ratioChart('How many times better than the reference, which the same run timed', bars);
}
