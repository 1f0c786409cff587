// Which caches of keys in codes of codebooks are compared, values on the host: those that the command names, and others.
import { hcAttentionHostBytes, hcAttentionPrefill, hcAttentionStore, loadCodebooks, placeCodebooks } from '../../../packages/hcattn-quant/dist/index.js';
import { openPolicy } from '../../../packages/policies/dist/index.js';
import { hostPool, kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const named = (name) => ({ name, policy: async (model, cache) => (await openPolicy(name, model, cache)).policy });
const codes = (name, groups, { prefill, ...options }) => ({
  name,
  async policy({ device, directory, config }, { contextTokens }) {
    const keys = await placeCodebooks(device, await loadCodebooks(`${directory}/codebooks-${groups}.safetensors`));
    const store = { keys, valuesOn: 'host', ...options };
    const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
    const capacity = { device, slots: 1, tokensPerSlot: contextTokens, tokens: contextTokens };
    const pool = await hostPool(device, { bytes: hcAttentionHostBytes(store, layers, capacity) });
    return kvPolicy({ prefill, store: hcAttentionStore({ ...store, hostPool: pool }) });
  },
});

export const settings = [
  named('dense'),
  named('hcattn-1/4'),
  codes('hcattn-1/4, prompts dense', 32, {}),
  codes('hcattn-1/4, all values', 32, { prefill: hcAttentionPrefill(), tau: 1 }),
  codes('hcattn-1/4, no windows', 32, { prefill: hcAttentionPrefill(), sinkTokens: 0, localWindow: 0 }),
  codes('hcattn-1/4, values in 8 bits', 32, { prefill: hcAttentionPrefill(), values: 'int8' }),
  named('hcattn-1/8'),
  codes('hcattn-1/8, prompts dense', 16, {}),
  named('hbw-1/4+hcattn'),
];
