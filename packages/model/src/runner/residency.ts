import { CapabilityError } from '@kv/sparse-core';
import type { KvDemand, KvPolicy, KvStore, Stream } from '@kv/sparse-core';

import type { LayerRunner } from './layer-runner.js';
import type { Sequence } from './sequence.js';

/** @throws CapabilityError that names the store, unless all layers' stores can do it */
function expectAll(layers: readonly LayerRunner[], method: 'evict' | 'setBudget', purpose: string): void {
  const lacking = layers.find(({ store }) => store[method] === undefined);
  if (lacking === undefined) return;
  const { name } = lacking.store;
  throw new CapabilityError(`The store '${name}' ${purpose}. Make the runner with a policy whose store has ${method}().`, {
    subject: 'store',
    given: name,
    wanted: `a store with ${method}()`,
  });
}

/** @throws CapabilityError for a store that holds nothing in host memory */
export function evictLayers(stream: Stream, layers: readonly LayerRunner[], slot: number): void {
  expectAll(layers, 'evict', 'has no copies in host memory that a sequence could be read from');
  for (const { store } of layers) store.evict?.(stream, slot);
}

/** @throws CapabilityError for a store without budgets; InvalidValueError for one that it cannot keep */
export function limitLayers(stream: Stream, layers: readonly LayerRunner[], sequence: Sequence, budgetTokens: number | undefined): void {
  expectAll(layers, 'setBudget', 'reads all tokens that it holds');
  const limited: KvStore[] = [];
  try {
    for (const { store } of layers) {
      store.setBudget?.(stream, sequence.slot, budgetTokens);
      limited.push(store);
    }
  } catch (error) {
    for (const store of limited) store.setBudget?.(stream, sequence.slot, sequence.budgetTokens);
    throw error;
  }
  sequence.limit(budgetTokens);
}

/** Of all layers: steps that each of them has counted, the largest working set, and hits and misses together. */
export function demandOf(layers: readonly LayerRunner[], slot: number): KvDemand | undefined {
  // A store reads its counts for whoever asked: all are asked, also behind one that knows nothing yet.
  let known: KvDemand | undefined;
  let unknown = false;
  for (const { store } of layers) {
    const told = store.demand?.(slot);
    if (told === undefined) unknown = true;
    else if (known === undefined) known = told;
    else {
      known = {
        step: Math.min(known.step, told.step),
        workingSet: Math.max(known.workingSet, told.workingSet),
        hits: known.hits + told.hits,
        misses: known.misses + told.misses,
      };
    }
  }
  return unknown ? undefined : known;
}

/** What selects of a prompt, keeps a state of it, or holds it otherwise when it has ended. */
export function uncuttablePart({ select, prefill }: KvPolicy, layers: readonly LayerRunner[]): string | undefined {
  if (select !== undefined) return select.name;
  if (prefill.open !== undefined) return prefill.name;
  return layers.find(({ store }) => store.copy === undefined || store.finishPrefill !== undefined)?.store.name;
}
