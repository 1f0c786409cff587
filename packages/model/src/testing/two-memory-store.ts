import { densePagedStore, InvalidValueError } from '@kv/sparse-core';
import type { KvDemand, KvStore, KvStoreFactory } from '@kv/sparse-core';

/** What a layer's store was told. */
export interface ToldStore {
  readonly layer: number;
  readonly method: 'evict' | 'setBudget';
  readonly slot: number;
  readonly budgetTokens?: number | undefined;
}

/**
 * A dense store that is told what stores with two memories are, and does nothing of it.
 * @param told is added to
 * @param most budget of a layer
 */
export function twoMemoryStore(
  told: ToldStore[] = [],
  { demand, most = () => 64 }: { demand?: (layer: number) => KvDemand | undefined; most?: (layer: number) => number } = {},
): KvStoreFactory {
  const dense = densePagedStore({ dtype: 'f32' });
  return {
    name: 'two memories',
    create: (...args) =>
      dense.create(...args).map((store) => {
        const layer = store.layer.index;
        const methods: Pick<KvStore, 'demand' | 'evict' | 'setBudget'> = {
          demand: () => demand?.(layer),
          evict: (_stream, slot) => told.push({ layer, method: 'evict', slot }),
          setBudget: (_stream, slot, budgetTokens) => {
            if ((budgetTokens ?? 0) > most(layer)) throw new InvalidValueError('too many');
            told.push({ layer, method: 'setBudget', slot, budgetTokens });
          },
        };
        return Object.assign(store, methods);
      }),
  };
}
