// Which sparse caches are compared: what of a prompt is sparse while it is read, and what is after it.
import { hieraSparsePrefill, hieraSparseStore } from '../../../packages/hierasparse/dist/index.js';
import { kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const [half, values, keys, both] = [
  { keys: 0.5, values: 0.5 },
  { values: 1 },
  { keys: 1 },
  { keys: 1, values: 1 },
];

/** Such as `S_K = 0.5, S_V = 1`. */
function nameOf(sparsity) {
  const parts = [sparsity.keys && `S_K = ${sparsity.keys}`, sparsity.values && `S_V = ${sparsity.values}`];
  return parts.filter(Boolean).join(', ') || 'dense';
}

const setting = (prompt, after) => ({
  name: `${nameOf(prompt)} → ${nameOf(after)}`,
  prompt: nameOf(prompt),
  after: nameOf(after),
  // Prompts that stay dense are computed by the store's attention over dense blocks, as they are in the command.
  policy: () => kvPolicy({ prefill: hieraSparsePrefill(prompt), store: hieraSparseStore(after) }),
});

export const settings = [
  { name: 'dense', prompt: 'dense', after: 'dense', policy: () => kvPolicy() },
  ...[values, keys, half, both].map((after) => setting({}, after)),
  setting(values, values),
  setting(values, both),
  setting(keys, keys),
  setting(half, half),
  setting(both, both),
];
