// Which prompts over some of their blocks are compared: those that the command names, and the paper's rules without what it
// does not have, rows at a prompt's end that attend to all keys.
import { createPolicy } from '../../../packages/policies/dist/index.js';
import { skeletonPrefill } from '../../../packages/skeleton-prefill/dist/index.js';
import { kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const named = ['dense', 'skeleton', 'skeleton-1/8', 'clustered', 'skeleton-1/8+hbw-1/4'];
const rules = { 'skeleton, ε = 0.8': { epsilon: 0.8 }, 'skeleton, budget 1/4': { budget: 1 / 4 }, 'skeleton, budget 1/8': { budget: 1 / 8 } };

export const settings = [
  ...named.map((name) => ({ name, policy: () => createPolicy(name) })),
  { name: 'skeleton, budget 1/4', policy: () => kvPolicy({ prefill: skeletonPrefill({ budget: 1 / 4 }) }) },
  ...Object.entries(rules).map(([name, rule]) => ({
    name: `${name}, no dense last rows`,
    policy: () => kvPolicy({ prefill: skeletonPrefill({ ...rule, denseLastRows: 0 }) }),
  })),
];
