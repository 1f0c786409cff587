import { expectNode } from './expect-node.js';

expectNode();

export type { CudaReport } from './addon.js';
export type { DeviceKind, InstructionSet, MemoryReport } from './native-handles.js';
export { createDevice, cudaReport, type DeviceOptions, devices } from './device.js';
export { type Capable } from './contracts/capability.js';
export { kvPolicy, type KvPolicy, type KvPolicyParts } from './contracts/kv-policy.js';
export { type KvSelector, type SelectCall } from './contracts/kv-selector.js';
export {
  type AppendCall,
  type AttentionCall,
  type FinishDecode,
  type KvBytes,
  type KvCapacity,
  type KvDemand,
  type KvLayer,
  type KvStore,
  type KvStoreFactory,
} from './contracts/kv-store.js';
export {
  type Attended,
  type PrefillAttention,
  type PrefillCall,
  type PrefillReport,
  type PrefillState,
} from './contracts/prefill-attention.js';
export { createRowBatch, type RowBatch, type RowBatchEntry } from './contracts/row-batch.js';
export { type SelectionOutcomes, type TokenSelection } from './contracts/token-selection.js';
export { byteSize, type DType, type ElementArray, type FloatDType } from './dtype.js';
export {
  CapabilityError,
  DeviceError,
  DisposedError,
  DTypeError,
  InvalidValueError,
  KvError,
  type KvErrorCode,
  type KvErrorDetails,
  ModelFormatError,
  OutOfMemoryError,
  QueueFullError,
  ShapeError,
} from './errors.js';
export type { Device, MappedFile, Recording, Stream, StreamOptions, Tensor, TensorHandle, WaitOptions } from './handles.js';
export { HostPool, hostPool, type HostPoolOptions, type HostPoolProgress } from './host-pool.js';
export { type Axes, type Extents } from './layout.js';
export { type NativeBinary, nativeBinary } from './load-addon.js';
export { type MemoryStreams } from './memory-streams.js';
export { embedding, type EmbeddingArguments } from './operations/embedding.js';
export { crossEntropy, type CrossEntropyArguments } from './operations/cross-entropy.js';
export { copyBlocks, type CopyBlocksArguments } from './operations/copy-blocks.js';
export { gatherKv, type GatherKvArguments } from './operations/gather-kv.js';
export { appendKv, type AppendKvArguments, type RowTurn } from './operations/append-kv.js';
export { type AttentionArguments, type PagedRows } from './operations/attention-arguments.js';
export { blockSparseAttention, type BlockSparseAttentionArguments } from './operations/block-sparse-attention.js';
export { decodeAttention } from './operations/decode-attention.js';
export { linear, type LinearArguments, type LinearLayer } from './operations/linear.js';
export { type AttentionPart, mergeAttention, type MergeAttentionArguments } from './operations/merge-attention.js';
export { prefillAttention } from './operations/prefill-attention.js';
export { rmsNorm, type RmsNormArguments } from './operations/rms-norm.js';
export { rope, type RopeArguments } from './operations/rope.js';
export {
  type RopeConvention,
  type RopeDescription,
  ropeDescription,
  type RopeOptions,
  type RopeScaling,
} from './operations/rope-description.js';
export { sample, type SampleArguments, sampleOutcomes, type SampleSettings } from './operations/sample.js';
export { swiglu, type SwigluArguments } from './operations/swiglu.js';
export { transferBlocks, type TransferBlocksArguments } from './operations/transfer-blocks.js';
export { writeEntries, type WriteEntriesArguments } from './operations/write-entries.js';
export { type PagedBlocks } from './paged-blocks.js';
export { roundToBf16 } from './round-to-bf16.js';
export { densePagedStore, type DensePagedOptions } from './stores/dense-paged-store.js';
export { densePrefill } from './stores/dense-prefill.js';
