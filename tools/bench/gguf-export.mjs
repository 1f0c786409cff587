// Writes the Llama of a Hugging Face directory as a GGUF v3 file, so that llama.cpp can be timed on the same
// weights.
//
//   node tools/bench/gguf-export.mjs MODEL_DIRECTORY FILE.gguf
//
// Matrices keep their f16 or bf16 bits; norms become f32, as llama.cpp wants them. Rows of the query and key
// projections are reordered, because GGUF's Llama rotates neighbouring pairs and Hugging Face's rotates
// halves. The tokenizer is carried as byte-level BPE without its pre-tokenizer: feed token ids, not text.
import { Buffer } from 'node:buffer';
import { closeSync, openSync, readFileSync, readSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const ALIGNMENT = 32;
const GGML_TYPE = { F32: 0, F16: 1, BF16: 30 };
const FILE_TYPE = { F16: 1, BF16: 32 };
const TOKEN_TYPE = { normal: 1, control: 3 };

const LAYER_NAMES = {
  attn_norm: 'input_layernorm',
  attn_q: 'self_attn.q_proj',
  attn_k: 'self_attn.k_proj',
  attn_v: 'self_attn.v_proj',
  attn_output: 'self_attn.o_proj',
  ffn_norm: 'post_attention_layernorm',
  ffn_gate: 'mlp.gate_proj',
  ffn_up: 'mlp.up_proj',
  ffn_down: 'mlp.down_proj',
};

// Scalars and arrays of GGUF's key-value part: a type number, then the value.
const u32 = (value) => ({ type: 4, bytes: Buffer.from(Uint32Array.of(value).buffer) });
const f32 = (value) => ({ type: 6, bytes: Buffer.from(Float32Array.of(value).buffer) });
const bool = (value) => ({ type: 7, bytes: Buffer.of(value ? 1 : 0) });
const u64Bytes = (value) => Buffer.from(BigUint64Array.of(BigInt(value)).buffer);
const text = (value) => ({
  type: 8,
  bytes: Buffer.concat([u64Bytes(Buffer.byteLength(value)), Buffer.from(value)]),
});
const array = (elements) => ({
  type: 9,
  bytes: Buffer.concat([
    u32(elements[0].type).bytes,
    u64Bytes(elements.length),
    ...elements.map((e) => e.bytes),
  ]),
});
const i32 = (value) => ({ type: 5, bytes: Buffer.from(Int32Array.of(value).buffer) });

function readJson(directory, name) {
  return JSON.parse(readFileSync(join(directory, name), 'utf8'));
}

/** Opens model.safetensors: `{ tensors: name → {dtype, shape}, read(name) → Buffer, close() }`. */
function openWeights(directory) {
  const file = openSync(join(directory, 'model.safetensors'), 'r');
  const readAt = (position, length) => {
    const bytes = Buffer.alloc(length);
    const got = readSync(file, bytes, 0, length, position);
    if (got !== length)
      throw new Error(`model.safetensors ends at ${position + got}; wanted ${position + length}`);
    return bytes;
  };
  const headerLength = Number(readAt(0, 8).readBigUInt64LE());
  const tensors = JSON.parse(readAt(8, headerLength).toString());
  delete tensors.__metadata__;
  const read = (name) => {
    const [begin, end] = tensors[name].data_offsets;
    return readAt(8 + headerLength + begin, end - begin);
  };
  return { tensors, read, close: () => closeSync(file) };
}

function checkConfig(config) {
  const problem =
    (config.model_type !== 'llama' && `model_type is ${config.model_type}`) ||
    (config.rope_scaling && 'rope_scaling is set') ||
    (config.attention_bias && 'attention_bias is set');
  if (problem) throw new Error(`${problem}; this exporter writes plain Llama models only`);
}

/** Half-split rotary rows [head, half, pair] → neighbouring pairs [head, pair, half]. */
function interleaveRotaryRows(bytes, heads, rows) {
  const rowBytes = bytes.length / rows;
  const headDim = rows / heads;
  const result = Buffer.alloc(bytes.length);
  for (let row = 0; row < rows; row++) {
    const inHead = row % headDim;
    const source = row - inHead + (inHead % 2) * (headDim / 2) + (inHead >> 1);
    bytes.copy(result, row * rowBytes, source * rowBytes, (source + 1) * rowBytes);
  }
  return result;
}

/** bf16 or f16 bits → f32 bytes. */
function widen(bytes, dtype) {
  if (dtype === 'F32') return bytes;
  const halves = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  const toFloat = dtype === 'BF16' ? bfloatToFloat : halfToFloat;
  return Buffer.from(Float32Array.from(halves, toFloat).buffer);
}

function bfloatToFloat(bits) {
  return new Float32Array(Uint32Array.of(bits << 16).buffer)[0];
}

function halfToFloat(bits) {
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  const magnitude = exponent === 0 ? mantissa * 2 ** -24 : (1024 + mantissa) * 2 ** (exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

/** GGUF tensors in order: name, the Hugging Face name, and what is done to the bytes. */
function plan(config, tensors) {
  const entry = (name, source, heads) => {
    const found = tensors[source];
    if (found === undefined) throw new Error(`model.safetensors has no tensor ${source}`);
    const isNorm = found.shape.length === 1;
    const convert = isNorm
      ? (bytes) => widen(bytes, found.dtype)
      : heads
        ? (bytes) => interleaveRotaryRows(bytes, heads, found.shape[0])
        : (bytes) => bytes;
    const dtype = isNorm ? 'F32' : found.dtype;
    const byteLength = found.shape.reduce((product, length) => product * length) * (dtype === 'F32' ? 4 : 2);
    return { name, source, shape: found.shape, dtype, byteLength, convert };
  };
  const entries = [entry('token_embd.weight', 'model.embed_tokens.weight')];
  for (let layer = 0; layer < config.num_hidden_layers; layer++) {
    for (const [name, source] of Object.entries(LAYER_NAMES)) {
      const heads = { attn_q: config.num_attention_heads, attn_k: config.num_key_value_heads }[name];
      entries.push(entry(`blk.${layer}.${name}.weight`, `model.layers.${layer}.${source}.weight`, heads));
    }
  }
  entries.push(entry('output_norm.weight', 'model.norm.weight'));
  if (!config.tie_word_embeddings) entries.push(entry('output.weight', 'lm_head.weight'));
  return entries;
}

function metadata(config, tokenizer, matrixDtype) {
  const headDim = config.head_dim ?? config.hidden_size / config.num_attention_heads;
  const tokens = Object.entries(tokenizer.model.vocab)
    .sort((a, b) => a[1] - b[1])
    .map(([token]) => token);
  const controls = new Set(tokenizer.added_tokens.map(({ id }) => id));
  const merges = tokenizer.model.merges.map((merge) => (Array.isArray(merge) ? merge.join(' ') : merge));
  return {
    'general.architecture': text('llama'),
    'general.file_type': u32(FILE_TYPE[matrixDtype]),
    'llama.context_length': u32(config.max_position_embeddings),
    'llama.embedding_length': u32(config.hidden_size),
    'llama.block_count': u32(config.num_hidden_layers),
    'llama.feed_forward_length': u32(config.intermediate_size),
    'llama.attention.head_count': u32(config.num_attention_heads),
    'llama.attention.head_count_kv': u32(config.num_key_value_heads),
    'llama.attention.key_length': u32(headDim),
    'llama.attention.value_length': u32(headDim),
    'llama.attention.layer_norm_rms_epsilon': f32(config.rms_norm_eps),
    'llama.rope.dimension_count': u32(headDim),
    'llama.rope.freq_base': f32(config.rope_theta),
    'llama.vocab_size': u32(config.vocab_size),
    'tokenizer.ggml.model': text('gpt2'),
    'tokenizer.ggml.pre': text('default'),
    'tokenizer.ggml.tokens': array(tokens.map(text)),
    'tokenizer.ggml.token_type': array(
      tokens.map((_, id) => i32(controls.has(id) ? TOKEN_TYPE.control : TOKEN_TYPE.normal)),
    ),
    'tokenizer.ggml.merges': array(merges.map(text)),
    'tokenizer.ggml.bos_token_id': u32(config.bos_token_id),
    'tokenizer.ggml.eos_token_id': u32(config.eos_token_id),
    'tokenizer.ggml.add_bos_token': bool(false),
  };
}

const padding = (length) => Buffer.alloc((ALIGNMENT - (length % ALIGNMENT)) % ALIGNMENT);

function header(entries, keyValues) {
  const parts = [
    Buffer.from('GGUF'),
    u32(3).bytes,
    u64Bytes(entries.length),
    u64Bytes(Object.keys(keyValues).length),
  ];
  for (const [key, { type, bytes }] of Object.entries(keyValues))
    parts.push(text(key).bytes, u32(type).bytes, bytes);
  let offset = 0;
  for (const { name, shape, dtype, byteLength } of entries) {
    // GGUF lists the fastest axis first.
    parts.push(text(name).bytes, u32(shape.length).bytes, ...shape.toReversed().map(u64Bytes));
    parts.push(u32(GGML_TYPE[dtype]).bytes, u64Bytes(offset));
    offset += byteLength + padding(byteLength).length;
  }
  const bytes = Buffer.concat(parts);
  return Buffer.concat([bytes, padding(bytes.length)]);
}

/** Writes `file` from the Hugging Face Llama in `directory`; throws on any other architecture. */
export function exportGguf(directory, file) {
  const config = readJson(directory, 'config.json');
  checkConfig(config);
  const weights = openWeights(directory);
  const entries = plan(config, weights.tensors);
  const output = openSync(file, 'w');
  writeSync(
    output,
    header(entries, metadata(config, readJson(directory, 'tokenizer.json'), entries[0].dtype)),
  );
  for (const { source, convert } of entries) {
    const bytes = convert(weights.read(source));
    writeSync(output, bytes);
    writeSync(output, padding(bytes.length));
  }
  closeSync(output);
  weights.close();
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [directory, file] = process.argv.slice(2);
  if (file === undefined) throw new Error('usage: gguf-export.mjs MODEL_DIRECTORY FILE.gguf');
  exportGguf(directory, file);
}
