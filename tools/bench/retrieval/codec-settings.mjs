// Which caches of codes are compared: those that the command names, others of the same bits, and dense ones.
import { hcAttentionPrefill, hcAttentionStore } from '../../../packages/hcattn-quant/dist/index.js';
import { createPolicy } from '../../../packages/policies/dist/index.js';
import { kvPolicy } from '../../../packages/sparse-core/dist/index.js';

const named = (name) => ({ name, policy: () => createPolicy(name) });
const codes = (name, options) => ({
  name,
  policy: () => kvPolicy({ prefill: hcAttentionPrefill(), store: hcAttentionStore({ valuesOn: 'device', ...options }) }),
});

export const settings = [
  named('dense'),
  named('int8'),
  named('int4'),
  codes('int4, no window', { keys: 'int4', values: 'int4', localWindow: 0 }),
  named('halo-1/4'),
  named('halo-1/4+int4'),
];
