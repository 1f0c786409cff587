import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { measuredTable, withMeasured } from './measured-tables.mjs';

const ZEN_5 = 'AMD EPYC, family 26, model 2, 2.6 GHz';

// The rows that the README of a package shows.
const PACKAGES = {
  'sparse-core': [
    ['attention-h200', 'prefill 8x32768', 'GPU: prefill attention, 8 prompts of 32K tokens'],
    ['attention-h200', 'decode 8x32768', 'GPU: decode attention, 8 sequences of 32K'],
    ['attention-h200', 'decode 1x131072', 'GPU: decode attention, one sequence of 128K'],
    ['linear-h200', 'layers of a block, rows: 1', 'GPU: linear layers of one block of an 8B model, one row'],
    ['linear', 'linear, 512 × 768 → 2048, f32 weights, 2 threads', 'CPU: linear layer, 512 rows, 768 → 2,048, 2 threads'],
    ['attention-cpu', 'prefill-attention, 32/8 heads of 128, 4096 tokens, 2 threads', 'CPU: prefill attention, 4,096 tokens, 2 threads'],
    ['attention-cpu', 'decode-attention, 32/8 heads of 128, 4096 tokens, 2 threads', 'CPU: decode attention, 4,096 tokens, 2 threads'],
  ],
  model: [
    ['foundation-cpu', `prefill, 1.1B, 512 tokens of prompt, f16, 2 threads, ${ZEN_5}`, 'CPU: 1.1B model in f16, prompt of 512 tokens, 2 threads'],
    ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, f16, 2 threads, ${ZEN_5}`, 'CPU: 1.1B model in f16, answer, 2 threads'],
    ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, bf16, 2 threads, ${ZEN_5}`, 'CPU: 1.1B model in bf16, answer, 2 threads'],
    ['batched-steps-h200', 'decode step of 1 sequence of 4096 tokens', 'GPU: 8B model, decode step, 1 sequence of 4K'],
    ['batched-steps-h200', 'decode step of 8 sequences of 4096 tokens', 'GPU: the same, 8 sequences'],
    ['batched-steps-h200', 'decode step of 32 sequences of 4096 tokens', 'GPU: the same, 32 sequences'],
    ['batched-steps-h200', 'decode step of 128 sequences of 4096 tokens', 'GPU: the same, 128 sequences'],
  ],
  'hbw-select': [
    ['retrieval', 'HBW, 1/4 of the prompt, question-aware, 4K', 'small model, prompts of 4K, a quarter kept'],
    ['retrieval', 'HBW, 1/4 of the prompt, question-aware, 8K', 'small model, prompts of 8K, a quarter kept'],
    ['selection-h200', 'HBW-KV, 131072 tokens before the window, capacity 1024', 'GPU: `hbw`, 1,024 of 128K tokens, one layer'],
    ['selection-h200', 'SnapKV, 131072 tokens before the window, capacity 1024', 'GPU: `snapKv`, the same'],
    ['selection-cpu', 'scores, selection and gather, hbw 1024, 16384 tokens, 2 threads', 'CPU: `hbw`, 1,024 of 16K tokens, one layer with 8/2 heads of 64, 2 threads'],
  ],
  hierasparse: [
    ['hierasparse-quality', 'right answers, prompts S_V = 1, then S_V = 1', 'small model, values 2:4'],
    ['hierasparse-quality', 'right answers, prompts S_K = 0.5, S_V = 0.5, then S_K = 0.5, S_V = 0.5', 'small model, half of keys and values 2:4'],
    ['hierasparse-h200', 'decode 8x32768 S_V = 1', 'GPU: decode attention, 8 sequences of 32K, values 2:4'],
    ['hierasparse-h200', 'decode 8x32768 S_K = S_V = 1', 'GPU: the same, keys and values 2:4'],
    ['hierasparse-model-h200', 'first token, 32768 tokens of prompt, f16, hierasparse-v1', 'GPU: 8B model, first token of 32K, values 2:4'],
    ['hierasparse-model-h200', 'each later token, 32768 tokens of prompt, f16, hierasparse-v1', 'GPU: 8B model, a later token, values 2:4'],
    ['hierasparse-model-h200', 'each later token, 163840 tokens of prompt, f16, hierasparse-k1-v1', 'GPU: 8B model, a later token behind 160K, keys and values 2:4'],
  ],
  'hcattn-quant': [
    ['hcattn-quality', 'right answers, int8', 'small model, `int8`'],
    ['hcattn-quality', 'right answers, int4', 'small model, `int4`'],
    ['hcattn-quality', 'right answers, hcattn-1/4', 'small model, `hcattn-1/4`'],
    ['hcattn-h200', 'decode 8x32768, heads of 128, INT8', 'GPU: decode attention, 8 sequences of 32K, 8 bits'],
    ['hcattn-h200', 'decode 8x32768, heads of 128, INT4', 'GPU: the same, 4 bits'],
    ['hcattn-h200', 'scores of 1048576 tokens in codes, 64 groups, and lists, in one graph', 'GPU: scores of a million vector-coded keys of 8 kv heads, and the choice among them'],
    ['hcattn-cpu', 'decode, INT8, 32/8 heads of 128, 16384 tokens, 2 threads', 'CPU: decode attention of 8 layers behind 16K tokens, 8 bits, 2 threads'],
    ['hcattn-cpu', 'decode, INT4, 32/8 heads of 128, 16384 tokens, 2 threads', 'CPU: the same, 4 bits'],
  ],
  'hierarchical-kv': [
    ['serving-quality', 'right answers, 2048 tokens of each kv head by cuboidMean', 'small model, answers that read 2,048 of 4,096 and 8,192 tokens'],
    ['serving-h200', 'scores, top 64 blocks and plan of a layer, 8 sequences of 128K', 'GPU: choosing 64 blocks for each of 8 kv heads of 8 sequences of 128K, one layer'],
    ['serving-h200', 'loads of 4096 blocks of 2 x 8192 bytes, beside a copy a block', 'GPU: loading 4,096 blocks of 16 KiB'],
    ['serving-h200', 'step of 8 sequences of 32768 tokens, all that it reads on the device', 'GPU: 8B model, a step of 8 sequences of 32K, all that it reads on the device'],
    ['serving-h200', 'the step that resumes a sequence of 32768 tokens', 'GPU: 8B model, the step that resumes a sequence of 32K'],
    ['serving-cpu', 'a later token, offload-1/4, 16000 tokens of prompt, 2 threads', 'CPU: small model, a later token behind 16,000, 2 threads'],
  ],
  'serve-scheduler': [
    ['serving-h200', '8 requests of 4096 tokens that fit a cache of 75 % of all blocks', '8 requests of 4,096 tokens, room for three quarters of their blocks'],
    ['serving-h200', 'a prompt of 32768 tokens in layer segments of 8192 rows', 'prompt of 32K tokens in layer segments'],
    ['serving-h200', 'a prompt of 32768 tokens in chunks of 512', 'the same prompt in chunks of 512'],
    ['serving-h200', 'device bytes of a prompt of 131072 tokens in reading: its rows and one layer', 'device memory while a prompt of 128K is read in layer segments'],
  ],
  cli: [
    ['install', 'a new process to its first token, needle-8m, 2 threads', 'CPU: a new process to its first token, the small model, 2 threads'],
    ['foundation-cpu', `prefill, 1.1B, 512 tokens of prompt, f16, 2 threads, ${ZEN_5}`, 'CPU: 1.1B model in f16, prompt of 512 tokens, 2 threads'],
    ['foundation-cpu', `decode, 1.1B, 64 tokens of prompt, f16, 2 threads, ${ZEN_5}`, 'CPU: 1.1B model in f16, answer, 2 threads'],
  ],
};

/** Path and text of each package's README, with the table between its marks made anew; `files` are those of docs/benchmarks. */
export function packageTables(files) {
  return Object.entries(PACKAGES).map(([name, rows]) => {
    const path = fileURLToPath(new URL(`../../packages/${name}/README.md`, import.meta.url));
    return [path, withMeasured(readFileSync(path, 'utf8'), measuredTable(files, rows))];
  });
}
