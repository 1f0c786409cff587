// A cache of keys in codes of codebooks, as the lists of settings name it.
import { hcAttentionHostBytes, hcAttentionStore } from '../../../packages/hcattn-quant/dist/index.js';
import { hostPool, kvPolicy } from '../../../packages/sparse-core/dist/index.js';

/** `keysOf(model)` gives what the store takes as `keys`. */
export const codes = (name, keysOf, { prefill, ...options }) => ({
  name,
  async policy(model, { contextTokens }) {
    const { device, config } = model;
    const store = { keys: await keysOf(model), valuesOn: 'host', ...options };
    const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
    const capacity = { device, slots: 1, tokensPerSlot: contextTokens, tokens: contextTokens, prefill };
    const pool = await hostPool(device, { bytes: hcAttentionHostBytes(store, layers, capacity) });
    return kvPolicy({ prefill, store: hcAttentionStore({ ...store, hostPool: pool }) });
  },
});
