import { CapabilityError, densePagedStore, type KvStore, type PrefillAttention } from '@kv/sparse-core';
import { describeOnDevices, Random } from '@kv/sparse-core/testing';
import { expect, it } from 'vitest';
import { hieraSparsePrefill } from './hiera-sparse-prefill.js';
import { hieraSparseStore } from './hiera-sparse-store.js';
import { StoreRun } from './testing/store-run.js';

const layer = { index: 0, queryHeads: 4, kvHeads: 2, headDim: 64 };
const sparsity = { keys: 1, values: 0.5 };

/** A store that only hands on what it is asked, and is of no class that anybody knows. */
function wrap(store: KvStore, without?: keyof KvStore): KvStore {
  const passOn = (_: object, property: string | symbol): unknown => {
    if (property === 'name') return `wrapped ${store.name}`;
    if (property === without) return undefined;
    const value: unknown = Reflect.get(store, property, store);
    return typeof value === 'function' ? (value.bind(store) as unknown) : value;
  };
  return new Proxy<KvStore>({} as never, { get: passOn });
}

describeOnDevices('what a part of a policy asks of another', ({ open }) => {
  const device = open();

  function run(prefill: PrefillAttention, wrapped = (store: KvStore) => store, factory = hieraSparseStore(sparsity)) {
    const capacity = { device, slots: 1, tokensPerSlot: 1024, tokens: 1024, batchRows: 700, prefill };
    const [store] = factory.create([layer], capacity);
    if (store === undefined) throw new Error('a store for the layer');
    const options = { device, random: new Random(1), dtype: 'f16', slots: 1, group: 2 } as const;
    return new StoreRun(wrapped(store), prefill, options);
  }

  const read = (steps: StoreRun) => steps.step([{ slot: 0, position: 0, rows: 640 }], 'prefill');

  it('reaches a store through one that wraps it', async () => {
    const [plain, wrapped] = [run(hieraSparsePrefill(sparsity)), run(hieraSparsePrefill(sparsity), (store) => wrap(store))];
    expect(await read(wrapped)).toEqual(await read(plain));
    expect(wrapped.store.bytes()).toEqual(plain.store.bytes());
    for (const { store } of [plain, wrapped]) store.dispose();
  });

  it('reaches the sparsity of prompts through an attention that wraps it', () => {
    const prefill = hieraSparsePrefill(sparsity);
    const wrapped: PrefillAttention = {
      name: 'wrapped',
      capability: (name) => prefill.capability?.(name),
      attend: (stream, call) => prefill.attend(stream, call),
    };
    const deaf: PrefillAttention = { name: 'deaf', attend: (stream, call) => prefill.attend(stream, call) };
    const stores = [prefill, wrapped, deaf].map((each) => run(each).store);
    const [plain, same, other] = stores.map((store) => store.reserved().device);
    expect(same).toBe(plain);
    expect(other).not.toBe(plain);
    for (const store of stores) store.dispose();
  });

  it('is refused by its name where a store lacks it', async () => {
    const prefill = hieraSparsePrefill(sparsity);
    for (const [steps, name] of [
      [run(prefill, (store) => wrap(store, 'capability')), 'wrapped hierasparse S_K=1 S_V=0.5'],
      [run(prefill, undefined, densePagedStore()), 'dense'],
    ] as const) {
      const refused = await read(steps).then(
        () => undefined,
        (error: unknown) => error,
      );
      expect(refused).toBeInstanceOf(CapabilityError);
      expect((refused as CapabilityError).message).toBe(
        "'hierasparse S_K=1 S_V=0.5' needs the capability 'hierasparse: prompts in sparse blocks', which " +
          `'${name}' lacks. Give kvPolicy() what has it, such as hieraSparseStore(); a part that wraps another passes on ` +
          'its capability().',
      );
      steps.store.dispose();
    }
  });
});
