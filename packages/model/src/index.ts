export { readModelConfig } from './config/read-model-config.js';
export type { ModelConfig, ModelFamily, RopeConfig } from './config/model-config.js';
export { generate } from './generate/generate.js';
export type { GenerateOptions } from './generate/generate.js';
export type { GeneratedToken } from './generate/with-texts.js';
export { withTexts } from './generate/with-texts.js';
export { generateTokens } from './generate/generate-tokens.js';
export type { FinishReason, GeneratedId, GenerateTokensOptions } from './generate/generate-tokens.js';
export { prefill } from './generate/prefill.js';
export type { PrefillOptions, PrefillProgress } from './generate/prefill.js';
export { StopMatcher } from './generate/stop-matcher.js';
export { Model } from './model.js';
export type { ModelOptions } from './model.js';
export type { ModelBatch } from './runner/model-batch.js';
export type { BatchEntry, DeviceIds, Phase } from './runner/batch-entry.js';
export { Runner } from './runner/runner.js';
export type { Logits } from './runner/head.js';
export type { RunnerModel } from './runner/runner-model.js';
export type { ForkOptions, RunnerOptions, SequenceOptions } from './runner/runner-options.js';
export type { Sequence } from './runner/sequence.js';
export { readStoredTensors } from './safetensors/weight-files.js';
export type { StoredDType, StoredTensor } from '@kv/sparse-core/native';
export type { ChatMessage, ChatTemplateOptions } from './tokenizer/chat-template.js';
export type { StreamDecoder } from './tokenizer/stream-decoder.js';
export { Tokenizer } from './tokenizer/tokenizer.js';
export type { DecodeOptions, EncodeOptions } from './tokenizer/tokenizer.js';
export type { ModelWeights } from './weights/model-weights.js';
export type { LayerWeights, LinearWeights } from './weights/model-weights.js';

/** What a user of models needs of `@kv/sparse-core`, so that one package is enough where each must be installed. */
export {
  CapabilityError,
  createDevice,
  cudaReport,
  densePagedStore,
  densePrefill,
  DeviceError,
  devices,
  DisposedError,
  DTypeError,
  InvalidValueError,
  KvError,
  kvPolicy,
  ModelFormatError,
  OutOfMemoryError,
  QueueFullError,
  ropeDescription,
  roundToBf16,
  ShapeError,
} from '@kv/sparse-core';
export type {
  CudaReport,
  DensePagedOptions,
  Device,
  DeviceKind,
  DeviceOptions,
  ElementArray,
  FloatDType,
  InstructionSet,
  KvBytes,
  KvErrorCode,
  KvErrorDetails,
  KvPolicy,
  KvPolicyParts,
  KvSelector,
  KvStore,
  KvStoreFactory,
  MemoryReport,
  PrefillAttention,
  PrefillReport,
  RopeDescription,
  RopeOptions,
  RopeScaling,
  SampleSettings,
  SelectCall,
  Stream,
  TensorHandle,
  TokenSelection,
} from '@kv/sparse-core';
