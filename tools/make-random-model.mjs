// Writes a Hugging Face Llama directory with random weights: a model of any size to time and to test with.
//
//   node tools/make-random-model.mjs --output DIR [--layers 12] [--hidden 768] [--query-heads 12] [--kv-heads 4]
//     [--head-dim 64] [--intermediate 2048] [--vocabulary 32000] [--context 32768] [--dtype f16|bf16] [--seed 1]
//
// The defaults are the model of docs/benchmarks/foundation-cpu.json. Weights are N(0, 0.02), norms are 1, the
// head is not tied. The tokenizer is a byte-level BPE whose merges spell out the lower-case letter strings in
// order.
import { Buffer } from 'node:buffer';
import { closeSync, mkdirSync, openSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const NORMAL_DRAWS = 65_536;
const STANDARD_DEVIATION = 0.02;

const TO_BITS = { f16: halfBits, bf16: bfloatBits };
const SAFETENSORS_DTYPE = { f16: 'F16', bf16: 'BF16' };
const TORCH_DTYPE = { f16: 'float16', bf16: 'bfloat16' };

/** Nearest f16 (ties to even) of a finite number below 65,504 in magnitude, as its 16 bits. */
function halfBits(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const magnitude = Math.abs(value);
  const exponent = Math.max(-14, Math.floor(Math.log2(magnitude)));
  const steps = roundHalfEven(magnitude / 2 ** (exponent - 10));
  // A subnormal has steps < 1024 and exponent -14; a carry out of the mantissa raises the exponent by itself.
  return magnitude === 0 ? sign : sign | ((exponent + 14) * 1024 + steps);
}

/** Nearest bf16 (ties to even) of a finite number, as its 16 bits. */
function bfloatBits(value) {
  const bits = new Uint32Array(Float32Array.of(value).buffer)[0];
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function roundHalfEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

/** mulberry32: a seeded generator of u32. */
function randomGenerator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return (mixed ^ (mixed >>> 14)) >>> 0;
  };
}

/** A pool of draws from N(0, 0.02) in the storage type; a weight is one of them, which is fast and random enough. */
function normalPool(random, toBits) {
  const uniform = () => (random() + 0.5) / 2 ** 32;
  return Uint16Array.from({ length: NORMAL_DRAWS }, () =>
    toBits(STANDARD_DEVIATION * Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform())),
  );
}

function randomWeights(count, random, pool) {
  const weights = new Uint16Array(count);
  for (let index = 0; index < count; index += 2) {
    const draw = random();
    weights[index] = pool[draw & 0xffff];
    weights[index + 1] = pool[draw >>> 16]; // past the end of an odd count it is dropped
  }
  return weights;
}

/** The tensors of a Llama in file order: name and shape. */
function tensorShapes({ layers, hidden, queryHeads, kvHeads, headDim, intermediate, vocabulary }) {
  const shapes = [['model.embed_tokens.weight', [vocabulary, hidden]]];
  for (let layer = 0; layer < layers; layer++) {
    const add = (name, ...shape) => shapes.push([`model.layers.${layer}.${name}.weight`, shape]);
    add('input_layernorm', hidden);
    add('self_attn.q_proj', queryHeads * headDim, hidden);
    add('self_attn.k_proj', kvHeads * headDim, hidden);
    add('self_attn.v_proj', kvHeads * headDim, hidden);
    add('self_attn.o_proj', hidden, queryHeads * headDim);
    add('post_attention_layernorm', hidden);
    add('mlp.gate_proj', intermediate, hidden);
    add('mlp.up_proj', intermediate, hidden);
    add('mlp.down_proj', hidden, intermediate);
  }
  shapes.push(['model.norm.weight', [hidden]], ['lm_head.weight', [vocabulary, hidden]]);
  return shapes;
}

function writeWeights(path, options) {
  const random = randomGenerator(options.seed);
  const toBits = TO_BITS[options.dtype];
  const pool = normalPool(random, toBits);
  const shapes = tensorShapes(options);
  const header = {};
  let offset = 0;
  for (const [name, shape] of shapes) {
    const end = offset + 2 * shape.reduce((product, length) => product * length);
    header[name] = { dtype: SAFETENSORS_DTYPE[options.dtype], shape, data_offsets: [offset, end] };
    offset = end;
  }
  const text = JSON.stringify(header);
  const headerBytes = Buffer.from(text.padEnd(Math.ceil(text.length / 8) * 8));
  const lengthBytes = Buffer.alloc(8);
  lengthBytes.writeBigUInt64LE(BigInt(headerBytes.length));
  const file = openSync(path, 'w');
  writeSync(file, lengthBytes);
  writeSync(file, headerBytes);
  for (const [, shape] of shapes) {
    const count = shape.reduce((product, length) => product * length);
    const isNorm = shape.length === 1;
    writeSync(file, isNorm ? new Uint16Array(count).fill(toBits(1)) : randomWeights(count, random, pool));
  }
  closeSync(file);
}

function config(options) {
  return {
    architectures: ['LlamaForCausalLM'],
    model_type: 'llama',
    attention_bias: false,
    mlp_bias: false,
    bos_token_id: 0,
    eos_token_id: 1,
    hidden_act: 'silu',
    hidden_size: options.hidden,
    head_dim: options.headDim,
    intermediate_size: options.intermediate,
    max_position_embeddings: options.context,
    num_attention_heads: options.queryHeads,
    num_hidden_layers: options.layers,
    num_key_value_heads: options.kvHeads,
    rms_norm_eps: 1e-5,
    rope_scaling: null,
    rope_theta: 10000,
    tie_word_embeddings: false,
    torch_dtype: TORCH_DTYPE[options.dtype],
    vocab_size: options.vocabulary,
  };
}

/** GPT-2's printable stand-ins for the 256 bytes, in byte order. */
function byteAlphabet() {
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => {
    const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    return String.fromCodePoint(printable ? byte : next++);
  });
}

function tokenizer(vocabulary) {
  const specials = ['<|bos|>', '<|eos|>'];
  const tokens = [...specials, ...byteAlphabet()];
  const merges = [];
  const letters = [...'abcdefghijklmnopqrstuvwxyz'];
  for (let words = letters; tokens.length < vocabulary;) {
    const longer = words.flatMap((word) => letters.map((letter) => [word, letter]));
    const taken = longer.slice(0, vocabulary - tokens.length);
    merges.push(...taken);
    tokens.push(...taken.map((pair) => pair.join('')));
    words = longer.map((pair) => pair.join(''));
  }
  return {
    version: '1.0',
    added_tokens: specials.map((content, id) => ({ id, content, special: true, normalized: false })),
    normalizer: null,
    pre_tokenizer: { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true },
    post_processor: {
      type: 'TemplateProcessing',
      single: [{ SpecialToken: { id: '<|bos|>', type_id: 0 } }, { Sequence: { id: 'A', type_id: 0 } }],
      pair: [{ Sequence: { id: 'A', type_id: 0 } }, { Sequence: { id: 'B', type_id: 0 } }],
      special_tokens: { '<|bos|>': { id: '<|bos|>', ids: [0], tokens: ['<|bos|>'] } },
    },
    decoder: { type: 'ByteLevel', add_prefix_space: false, trim_offsets: true, use_regex: true },
    model: {
      type: 'BPE',
      vocab: Object.fromEntries(tokens.map((token, id) => [token, id])),
      merges: merges.map((pair) => pair.join(' ')),
    },
  };
}

/** Sizes of the model that the benchmarks time: 12 layers × 768, GQA 12/4, head 64, Llama 2's vocabulary size. */
export const BENCHMARK_SIZES = {
  layers: 12,
  hidden: 768,
  queryHeads: 12,
  kvHeads: 4,
  headDim: 64,
  intermediate: 2048,
  vocabulary: 32_000,
  context: 32_768,
  dtype: 'f16',
  seed: 1,
};

/** Writes `directory` with config.json, tokenizer.json, tokenizer_config.json and model.safetensors. */
export function makeRandomModel(directory, sizes = {}) {
  const options = { ...BENCHMARK_SIZES, ...sizes };
  if (!(options.dtype in TO_BITS)) throw new Error(`dtype is ${options.dtype}; wanted f16 or bf16`);
  if (options.vocabulary < 258) throw new Error(`vocabulary is ${options.vocabulary}; wanted at least 258`);
  mkdirSync(directory, { recursive: true });
  const writeJson = (name, value) =>
    writeFileSync(join(directory, name), JSON.stringify(value, null, 1) + '\n');
  writeJson('config.json', config(options));
  writeJson('tokenizer.json', tokenizer(options.vocabulary));
  writeJson('tokenizer_config.json', {
    tokenizer_class: 'PreTrainedTokenizerFast',
    bos_token: '<|bos|>',
    eos_token: '<|eos|>',
    model_max_length: options.context,
  });
  writeWeights(join(directory, 'model.safetensors'), options);
}

function commandLine() {
  const words = (name) => name.replace(/[A-Z]/g, (capital) => `-${capital.toLowerCase()}`);
  const names = Object.keys(BENCHMARK_SIZES);
  const { values } = parseArgs({
    options: Object.fromEntries(['output', ...names].map((name) => [words(name), { type: 'string' }])),
  });
  if (values.output === undefined)
    throw new Error('--output DIR is missing: say where the model should be written');
  const given = names.filter((name) => values[words(name)] !== undefined);
  const read = (name) => (name === 'dtype' ? values.dtype : Number(values[words(name)]));
  makeRandomModel(values.output, Object.fromEntries(given.map((name) => [name, read(name)])));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) commandLine();
