// Which prompts over some of their blocks are compared, as the command names them.
import { createPolicy } from '../../../packages/policies/dist/index.js';

const names = ['dense', 'skeleton', 'skeleton-1/8', 'clustered', 'skeleton-1/8+hbw-1/4'];

export const settings = names.map((name) => ({ name, policy: () => createPolicy(name) }));
