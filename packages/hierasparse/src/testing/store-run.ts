import type { KvStore, PrefillAttention } from '@kv/sparse-core';
import { StoreRun as AnyStoreRun, type StoreRunOptions } from '@kv/sparse-core/testing';
import { HeadOracle } from './store-oracle.js';

/** Drives a store as a model does, beside an oracle of what it holds. */
export class StoreRun extends AnyStoreRun<HeadOracle> {
  constructor(store: KvStore, prefill: PrefillAttention, options: StoreRunOptions) {
    super(store, prefill, options, () => new HeadOracle(options.dtype, store.layer.headDim));
  }
}
