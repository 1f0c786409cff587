// The few rows that the README shows: a file of docs/benchmarks, a measure in it, and what it says to a stranger.
const HEADLINES = [
  ['install', 'npm install, packages', '`npm install @kv/model`: packages'],
  ['install', 'npm install, space on disk', 'the same: space on disk'],
  ['install', 'npm install, time', 'the same: time, nothing in the cache'],
  ['install', 'a new process to its first token, needle-8m, 2 threads', 'CPU: a new process to its first token, the small model'],
  ['foundation-cpu', 'prefill, 512 tokens of prompt, f16, 2 threads', 'CPU: a model of 125M reads a prompt of 512 tokens, 2 threads'],
  ['foundation-cpu', 'prefill, 4096 tokens of prompt, f16, 2 threads', 'CPU: it reads 4,096 tokens, 2 threads'],
  ['foundation-cpu', 'prefill, 16384 tokens of prompt, f16, 2 threads', 'CPU: it reads 16,384 tokens, 2 threads'],
  ['foundation-cpu', 'decode, 1.1B, 64 tokens of prompt, f16, 1 thread', 'CPU: a model of 1.1B answers, 1 thread'],
  ['foundation-cpu', 'decode, 1.1B, 64 tokens of prompt, f16, 2 threads', 'CPU: it answers, 2 threads'],
  ['foundation-cpu', 'prefill, 1.1B, 512 tokens of prompt, f16, 2 threads', 'CPU: it reads a prompt of 512 tokens, 2 threads'],
  ['linear', 'linear, 512 × 768 → 2048, f32 weights, 2 threads', 'CPU: linear layer, 512 rows, 768 → 2,048, 2 threads'],
  ['skeleton-cpu', 'prompt of 16384 tokens, 2 threads, clustered at 1/10', 'CPU: a prompt of 16,384 tokens of the small model over a tenth of its blocks'],
  ['serving-cpu', 'a later token, offload-1/4, 16000 tokens of prompt, 2 threads', 'CPU: a later token behind 16,000, a cache over two memories'],
  ['attention-h200', 'prefill 8x32768', 'H200: prefill attention, 8 prompts of 32K tokens'],
  ['attention-h200', 'prefill 1x131072', 'H200: prefill attention, one of 128K'],
  ['skeleton-h200', '128K, 97 % sparse: estimate, selection and attention', 'H200: attention of 128K tokens over 3 % of its blocks, with the estimate'],
  ['block-sparse-h200', 'block-sparse attention, random 3 %', 'H200: attention of 128K tokens over given lists of 3 % of its blocks'],
  ['skeleton-model-h200', 'first token, 131072 tokens of prompt, f16, skeleton, budget 0.03', 'H200: the first token of an 8B model, 128K prompt over 3 % of its blocks'],
  ['attention-h200', 'decode 8x32768', 'H200: decode attention, 8 sequences of 32K'],
  ['hierasparse-h200', 'decode 8x32768 S_K = S_V = 1', 'H200: decode attention, 8 of 32K in 2:4 sparse blocks'],
  ['hcattn-h200', 'decode 8x32768, heads of 128, INT8', 'H200: decode attention, 8 of 32K in codes of 8 bits'],
  ['hcattn-h200', 'decode 8x32768, heads of 128, INT4', 'H200: decode attention, 8 of 32K in codes of 4 bits'],
  ['hierasparse-model-h200', 'each later token, 32768 tokens of prompt, f16, hierasparse-v1', 'H200: a later token of an 8B model, 32K prompt, values 2:4'],
  ['hierasparse-model-h200', 'each later token, 163840 tokens of prompt, f16, hierasparse-k1-v1', 'H200: a later token, 160K prompt, keys and values 2:4'],
  ['hierasparse-model-h200', 'first token, 32768 tokens of prompt, f16, hierasparse-k1-v1', 'H200: its 32K prompt, keys and values 2:4'],
  ['hierasparse-model-h200', 'first token, 163840 tokens of prompt, f16, hierasparse-k1-v1', 'H200: its 160K prompt, keys and values 2:4'],
  ['attention-h200', 'decode 1x131072', 'H200: decode attention, one of 128K'],
  ['batched-steps-h200', 'decode step of 1 sequence of 4096 tokens', 'H200: a step of an 8B model, 1 sequence of 4K'],
  ['batched-steps-h200', 'decode step of 8 sequences of 4096 tokens', 'H200: 8 sequences in one step'],
  ['batched-steps-h200', 'decode step of 16 sequences of 4096 tokens', 'H200: 16 sequences in one step'],
  ['batched-steps-h200', 'decode step of 32 sequences of 4096 tokens', 'H200: 32 sequences in one step'],
  ['batched-steps-h200', 'decode step of 64 sequences of 4096 tokens', 'H200: 64 sequences in one step'],
  ['batched-steps-h200', 'decode step of 128 sequences of 4096 tokens', 'H200: 128 sequences in one step'],
  [
    'serving-h200',
    'scores, top 64 blocks and plan of a layer, 8 sequences of 128K',
    'H200: choosing 64 blocks for each of 8 key/value heads of 8 sequences of 128K, one layer',
  ],
  ['linear-h200', 'layers of a block, rows: 1', 'H200: linear layers of a Llama 8B block, one row'],
  ['selection-h200', 'HBW-KV, 131072 tokens before the window, capacity 1024', 'H200: choosing 1,024 of 128K tokens, one layer'],
];

const figure = (value) => Number(value.toPrecision(3)).toLocaleString('en-US');

function line({ better, result, reference, unit }, says) {
  const ratio = better === 'higher' ? result.median / reference.median : reference.median / result.median;
  const theirs = `${figure(reference.median)} ${unit}, ${reference.name}`;
  return `| ${says} | ${figure(result.median)} ${unit} | ${theirs} | ${ratio.toFixed(2)}× |`;
}

/** The README with the table between its marks made anew; `files` are those of docs/benchmarks. */
export function withHeadlines(readme, files) {
  const lines = HEADLINES.map(([name, measure, says]) => {
    const row = files.find((file) => file.name === name)?.rows.find((each) => each.measure === measure);
    if (row === undefined) throw new Error(`The README shows '${measure}' of ${name}.json, which has no such row`);
    return line(row, says);
  });
  const table = ['| measured | here | reference | ratio |', '|---|---|---|---|', ...lines].join('\n');
  return readme.replace(
    /(<!-- measured:begin -->\n)[^]*(<!-- measured:end -->)/,
    (_all, begin, end) => `${begin}${table}\n${end}`,
  );
}
