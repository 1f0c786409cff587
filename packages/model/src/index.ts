export { readModelConfig } from './config/read-model-config.js';
export type { ModelConfig, ModelFamily, RopeConfig, RopeScaling } from './config/model-config.js';
export { readStoredTensors } from './safetensors/weight-files.js';
export type { StoredDType, StoredTensor } from './safetensors/header.js';
export type { ChatMessage, ChatTemplateOptions } from './tokenizer/chat-template.js';
export { StreamDecoder } from './tokenizer/stream-decoder.js';
export { Tokenizer } from './tokenizer/tokenizer.js';
export type { DecodeOptions, EncodeOptions } from './tokenizer/tokenizer.js';
