import { expectNode } from './expect-node.js';

expectNode();

/** What packages that bring operations of their own build their wrappers with. */
export type { Addon, NativePagedRows } from './addon.js';
export type { NativeStream, NativeTensor } from './native-handles.js';
export { blockEntry, type BlockKind, blockNumber, isDense, mostBlocks, noBlock } from './block-entry.js';
export { answersApart } from './contracts/answers-apart.js';
export { Capability } from './contracts/capability.js';
export { type KvResidency, kvResidency } from './contracts/kv-residency.js';
export { endsUndense, expectPolicy, expectSelector } from './contracts/kv-policy.js';
export { checkedCall, entriesOf } from './contracts/row-batch.js';
export { openFile, readBytes } from './files/open-file.js';
export { describeValue, excerpt, isRecord, parseJson, readJson, readOptionalJson, readOptionalText } from './files/read-json.js';
export { readSafetensorsHeader, type TensorToStore, writeSafetensors } from './files/safetensors.js';
export type { SafetensorsHeader, StoredDType, StoredTensor } from './files/safetensors-header.js';
export { loadAddon } from './load-addon.js';
export { madeTogether } from './made-together.js';
export { operation } from './operation.js';
export { attentionRules, attentionSettings, batchRules, expectHeads, pagedRowRules } from './operations/attention-arguments.js';
export { expectSampleSettings } from './operations/sample.js';
export { isDevice } from './own-objects.js';
export { show } from './show.js';
export { BlockIds } from './stores/block-ids.js';
export { countDistinct } from './stores/count-distinct.js';
export type { DensePagedStore } from './stores/dense-paged-layer.js';
export { densePagedStores } from './stores/dense-paged-store.js';
export { expectCapacity } from './stores/expect-capacity.js';
export { expectHeld } from './stores/expect-held.js';
export { expectPrepared } from './stores/expect-prepared.js';
export { joinedIds } from './stores/joined-ids.js';
export { bytesOfPool, type HostMemory, hostMemoryOf } from './stores/host-memory.js';
export { KvBlockPool } from './stores/kv-block-pool.js';
export { LinkStream } from './stores/link-stream.js';
export { shorterBy } from './stores/shorter-by.js';
export { SlotBlocks } from './stores/slot-blocks.js';
export { type BlockTable, SlotTable } from './stores/slot-table.js';
export { nativeOf } from './tensor.js';
export { floats, type TensorRule } from './tensor-rules.js';
export {
  expectBoolean,
  expectCallback,
  expectContiguous,
  expectDType,
  expectIndices,
  expectObject,
  expectOptions,
  expectShape,
  expectSignal,
  expectThat,
  isFinite32,
  listFor,
  listOf,
  type OptionNames,
  reading,
} from './validate.js';
export { whenAborted } from './when-aborted.js';
