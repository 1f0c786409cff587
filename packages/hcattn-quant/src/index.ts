export { codeBitsOf, type Codebooks, type CodebookTraining, type LayerCodebooks } from './codebooks/codebooks.js';
export { loadCodebooks, type LoadCodebooksOptions, saveCodebooks } from './codebooks/codebooks-file.js';
export { decodeAttentionQuantized, type DecodeAttentionQuantizedArguments } from './operations/decode-attention-quantized.js';
export { hcAttentionPrefill } from './hc-attention-prefill.js';
export { type Codec, type HcAttentionOptions, hcAttentionStore } from './hc-attention-store.js';
export { type CodeBits, quantizedBlockBytes, type QuantizedBlocks } from './quantized-blocks.js';
export { dequantizeKv, type DequantizeKvArguments } from './operations/dequantize-kv.js';
export { loadValues, type LoadValuesArguments } from './operations/load-values.js';
export { quantizeKv, type QuantizeKvArguments } from './operations/quantize-kv.js';
