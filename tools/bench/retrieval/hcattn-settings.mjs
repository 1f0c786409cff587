// Which caches of keys in codes of codebooks are compared, values on the host: those that the command names, and others.
import { hcAttentionPrefill, loadCodebooks, placeCodebooks } from '../../../packages/hcattn-quant/dist/index.js';
import { openPolicy } from '../../../packages/policies/dist/index.js';
import { codes } from './coded-setting.mjs';

const named = (name) => ({ name, policy: async (model, cache) => (await openPolicy(name, model, cache)).policy });
const ofModel = (groups) => async ({ device, directory }) =>
  await placeCodebooks(device, await loadCodebooks(`${directory}/codebooks-${groups}.safetensors`));

export const settings = [
  named('dense'),
  named('hcattn-1/4'),
  codes('hcattn-1/4, prompts dense', ofModel(32), {}),
  codes('hcattn-1/4, all values', ofModel(32), { prefill: hcAttentionPrefill(), tau: 1 }),
  codes('hcattn-1/4, no windows', ofModel(32), { prefill: hcAttentionPrefill(), sinkTokens: 0, localWindow: 0 }),
  codes('hcattn-1/4, values in 8 bits', ofModel(32), { prefill: hcAttentionPrefill(), values: 'int8' }),
  named('hcattn-1/8'),
  codes('hcattn-1/8, prompts dense', ofModel(16), {}),
  named('hbw-1/4+hcattn'),
];
