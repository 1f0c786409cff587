import { densePrefill } from '../stores/dense-prefill.js';
import { densePagedStore } from '../stores/dense-paged-store.js';
import type { KvSelector } from './kv-selector.js';
import type { KvStoreFactory } from './kv-store.js';
import { expectObject, expectThat } from '../validate.js';
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

/** Composes a policy from one of each contract. `kvPolicy()` is dense attention over a dense paged cache. @throws InvalidValueError */
export function kvPolicy(parts: KvPolicyParts = {}): KvPolicy {
  expectObject('kvPolicy', 'parts', parts);
  const { prefill = densePrefill(), select, store = densePagedStore() } = parts;
  expectPart('prefill', prefill, 'attend');
  if (select !== undefined) expectPart('select', select, 'select');
  expectPart('store', store, 'create');
  const names = [prefill.name, select?.name, store.name].filter((name) => name !== undefined);
  return { name: [...new Set(names)].join(' + '), prefill, select, store };
}

/** @throws InvalidValueError unless it has a name and the method of its contract */
function expectPart<M extends string>(name: string, part: { readonly name: string } & Record<M, unknown>, method: M): void {
  expectObject('kvPolicy', name, part);
  const fits = typeof part.name === 'string' && typeof part[method] === 'function';
  expectThat('kvPolicy', name, part, fits, `an object with a name and the method ${method}`);
}
