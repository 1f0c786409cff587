/** What the tests of every package share. Not published. */
export { attentionRow, type AttentionSizes, type OracleRow, randomCache, type RandomCache } from './attention-oracle.js';
export { DescendingSlots } from './descending-slots.js';
export * from './legal-values.js';
export { enqueuedFailure, enqueueFailure } from './enqueue-failure.js';
export { eventually } from './eventually.js';
export { expectAllTried } from './expect-all-tried.js';
export { expectRefusals } from './expect-refusals.js';
export { type CacheDType, HeldRows } from './held-rows.js';
export { liveBytes } from './live-bytes.js';
export { type MisusedFunction, misusedOperation, MisuseSuite } from './misuse.js';
export { misusedStore } from './misused-stores.js';
export { uniform } from './philox.js';
export { decode, encode, Random, unitRoundoff } from './random.js';
export { remembered } from './remembered.js';
export { rawFile, safetensorsFile, type TensorToWrite, withDirectory } from './safetensors-file.js';
export { StoreRun, type StoreRunOptions } from './store-run.js';
export { describeOnDeviceKinds, describeOnDevices, type TestDevice } from './test-devices.js';
export { pagedWaves, waves } from './wave-tensors.js';
