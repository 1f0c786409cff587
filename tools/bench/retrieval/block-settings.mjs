// Which caches over two memories are compared: how many tokens an answer reads, and what blocks are scored by.
import { hierarchicalDeviceBytes, hierarchicalHostBytes, hierarchicalStore } from '../../../packages/hierarchical-kv/dist/index.js';
import { hostPool, kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const setting = (budgetTokens, metadata = 'cuboidMean') => ({
  name: `${budgetTokens} tokens, ${metadata}`,
  policy: async ({ device, config }, { contextTokens }) => {
    const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
    const capacity = { device, slots: 1, tokensPerSlot: contextTokens, tokens: contextTokens };
    const options = { budgetTokens, metadata };
    const pool = await hostPool(device, { bytes: hierarchicalHostBytes(options, layers, capacity) });
    return kvPolicy({ store: hierarchicalStore({ ...options, hostPool: pool, deviceBytes: hierarchicalDeviceBytes(options, layers, capacity, 1) }) });
  },
});

export const settings = [
  { name: 'dense', policy: () => kvPolicy() },
  ...[512, 1024, 1536, 2048].map((budget) => setting(budget)),
  setting(512, 'minMax'),
  setting(512, 'mean'),
];
