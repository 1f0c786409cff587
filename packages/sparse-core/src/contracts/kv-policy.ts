import { densePrefill } from '../stores/dense-prefill.js';
import { densePagedStore } from '../stores/dense-paged-store.js';
import type { KvSelector } from './kv-selector.js';
import type { KvStoreFactory } from './kv-store.js';
import type { PrefillAttention } from './prefill-attention.js';

/** How a model computes prompts, what it keeps of them, and how it holds what it keeps. */
export interface KvPolicy {
  /** The names of its parts, for tables. */
  readonly name: string;
  readonly prefill: PrefillAttention;
  readonly select: KvSelector | undefined;
  readonly store: KvStoreFactory;
}

export interface KvPolicyParts {
  /** Default: dense attention. */
  readonly prefill?: PrefillAttention | undefined;
  /** Default: keep everything. */
  readonly select?: KvSelector | undefined;
  /** Default: dense paged blocks in f16. */
  readonly store?: KvStoreFactory | undefined;
}

/** Composes a policy from one of each contract. `kvPolicy()` is dense attention over a dense paged cache. */
export function kvPolicy(parts: KvPolicyParts = {}): KvPolicy {
  const { prefill = densePrefill(), select, store = densePagedStore() } = parts;
  const names = [prefill.name, select?.name, store.name].filter((name) => name !== undefined);
  return { name: [...new Set(names)].join(' + '), prefill, select, store };
}
