// Which caches of keys in codes of codebooks are compared, values on the host: those that the command names, and others.
import { hcAttentionPrefill, loadCodebooks, placeCodebooks } from '../../../packages/hcattn-quant/dist/index.js';
import { openPolicy } from '../../../packages/policies/dist/index.js';
import { codes } from './coded-setting.mjs';

const named = (name) => ({ name, policy: async (model, cache) => (await openPolicy(name, model, cache)).policy });
const ofModel = (groups) => async ({ device, directory }) =>
  await placeCodebooks(device, await loadCodebooks(`${directory}/codebooks-${groups}.safetensors`));

const rescored = { prefill: hcAttentionPrefill(), hostKeys: true, tau: 0.98, sinkTokens: 0, localWindow: 64 };

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
  named('hcattn-rescored-1/8'),
  named('hcattn-rescored-1/16'),
  // The same codes and windows, where codes weigh what they chose.
  codes('hcattn-rescored-1/8, weights by codes', ofModel(16), { ...rescored, hostKeys: false }),
  codes('hcattn-rescored-1/16, weights by codes', ofModel(8), { ...rescored, hostKeys: false }),
  codes('hcattn-rescored-1/8, 0.9 of the attention', ofModel(16), { ...rescored, tau: 0.9 }),
  codes('hcattn-rescored-1/16, 0.9 of the attention', ofModel(8), { ...rescored, tau: 0.9 }),
  // Rivals of the same store: integer keys over values on the host.
  ...['int8', 'int4', 'int3', 'int2'].map((codec) => codes(`${codec} keys over host values`, () => codec, { prefill: hcAttentionPrefill() })),
  ...['int4', 'int3', 'int2'].map((codec) => codes(`plain ${codec} keys over host values`, () => codec, { prefill: hcAttentionPrefill(), rotated: false })),
  codes('int3 keys, rescored', () => 'int3', rescored),
  named('int8'),
  named('int4'),
];
