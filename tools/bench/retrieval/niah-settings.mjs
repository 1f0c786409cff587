// Under which caches a needle is looked for, as in HCAttention's Fig. 2: its own, and rivals that drop tokens.
import { openPolicy } from '../../../packages/policies/dist/index.js';

const names = ['dense', 'hcattn-1/4', 'hcattn-1/8', 'hcattn-rescored-1/8', 'hcattn-rescored-1/16', 'int4', 'halo-1/8'];

export const settings = names.map((name) => ({ name, policy: async (model, cache) => (await openPolicy(name, model, cache)).policy }));
