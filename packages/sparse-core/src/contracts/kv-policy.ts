import { densePrefill } from '../stores/dense-prefill.js';
import { densePagedStore } from '../stores/dense-paged-store.js';
import { CapabilityError } from '../errors.js';
import { Capability } from './capability.js';
import type { KvSelector } from './kv-selector.js';
import type { KvStoreFactory } from './kv-store.js';
import { expectObject, expectOptions, expectThat } from '../validate.js';
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

/** What a prefill attention says with which no prompt is dense when it ends, so that nothing can be selected of it. */
export const endsUndense = new Capability<object>('prompts that are not dense when they end', 'hcAttentionPrefill()');

/**
 * Composes a policy from one of each contract. `kvPolicy()` is dense attention over a dense paged cache.
 * @throws InvalidValueError; CapabilityError when the prefill attention leaves nothing that could be selected of
 */
export function kvPolicy(parts: KvPolicyParts = {}): KvPolicy {
  // A policy itself has a name, and may be given with another part.
  expectOptions<KvPolicyParts & { readonly name?: string }>('kvPolicy', parts, { prefill: true, select: true, store: true, name: true });
  const { prefill = densePrefill(), select, store = densePagedStore() } = parts;
  expectParts('kvPolicy', { prefill, select, store });
  const names = [prefill.name, select?.name, store.name].filter((name) => name !== undefined);
  return { name: [...new Set(names)].join(' + '), prefill, select, store };
}

/** @throws InvalidValueError unless it is made of one of each contract */
export function expectPolicy(operation: string, given: KvPolicy): void {
  // Anything may come: at first mostly a policy's name, or one part of a policy.
  const { name, prefill, store } = Object(given) as Partial<KvPolicy>;
  const isPolicy = typeof name === 'string' && prefill !== undefined && store !== undefined;
  expectThat(operation, 'policy', given, isPolicy, 'a policy: createPolicy(name) of @kv/policies, or kvPolicy({ prefill, select, store }) of one part or more');
  expectParts(operation, given);
}

/**
 * @throws InvalidValueError unless it is undefined or can select; CapabilityError when it observes prompts that are not dense
 * when they end
 */
export function expectSelector(operation: string, given: KvSelector | undefined, prefill: PrefillAttention): void {
  if (given === undefined) return;
  expectPart(operation, 'select', given, 'select');
  const { observationWindow } = given;
  const counts = Number.isInteger(observationWindow) && observationWindow >= 0;
  expectThat(operation, 'observationWindow', observationWindow, counts, 'a whole number from 0 on');
  if (observationWindow === 0 || endsUndense.of(prefill) === undefined) return;
  throw new CapabilityError(
    `${operation}: '${given.name}' selects of prompts that are dense when they end, and with the prefill attention ` +
      `'${prefill.name}' none is. Select with densePrefill().`,
    { subject: 'select', given: given.name, wanted: 'prefill attention over dense prompts' },
  );
}

function expectParts(operation: string, { prefill, select, store }: Omit<KvPolicy, 'name'>): void {
  expectPart(operation, 'prefill', prefill, 'attend');
  expectThat(operation, 'prefill', prefill, ['function', 'undefined'].includes(typeof prefill.expectStore), 'one whose expectStore is a function');
  expectSelector(operation, select, prefill);
  expectPart(operation, 'store', store, 'create');
}

/** @throws InvalidValueError unless it has a name and the method of its contract */
function expectPart<M extends string>(operation: string, name: string, part: { readonly name: string } & Record<M, unknown>, method: M): void {
  expectObject(operation, name, part);
  const fits = typeof part.name === 'string' && typeof part[method] === 'function';
  expectThat(operation, name, part, fits, `an object with a name and the method ${method}`);
}
