// What stands behind the colon of a prompt of model-bench: its policy, and how its rows say so.
import { hcAttentionHostBytes, hcAttentionPrefill, hcAttentionStore, placeCodebooks } from '../../packages/hcattn-quant/dist/index.js';
import { hbw } from '../../packages/hbw-select/dist/index.js';
import { createPolicy } from '../../packages/policies/dist/index.js';
import { clusteredPrefill, skeletonPrefill } from '../../packages/skeleton-prefill/dist/index.js';
import { hostPool, kvPolicy } from '../../packages/sparse-core/dist/index.js';

const nothing = () => undefined;
const presets = { clustered: clusteredPrefill, skeleton: skeletonPrefill };

/** The policy, for a cache of so many tokens; what it needs beside goes with `close()`. */
export async function openPolicy(cut, model, cache) {
  if (cut === undefined) return { policy: kvPolicy(), name: 'dense', close: nothing };
  if (/^\d+$/.test(cut)) return { policy: kvPolicy({ select: hbw({ capacity: Number(cut) }) }), name: `${cut} kept`, close: nothing };
  const [, preset, setting] = /^(\w+)=(.+)$/.exec(cut) ?? [];
  if (preset === 'hcattn') return await openCodes(setting, model, cache);
  if (preset === undefined) return { policy: createPolicy(cut), name: cut, close: nothing };
  return { policy: kvPolicy({ prefill: presets[preset]({ budget: Number(setting) }) }), name: `${preset}, budget ${setting}`, close: nothing };
}

/**
 * Keys in 13-bit codes of random codebooks, values on the host. The setting says how many groups a key has and how values are
 * held, and may say into blocks of how many tokens the text is cut, what share of the tokens an answer may read, and how
 * long the window is: 64/f16, 32/int8/block=4096/share=0.05, 64/f16/window=8192.
 */
async function openCodes(setting, model, { tokens, maxBatchRows }) {
  const [groups, values, ...others] = setting.split('/');
  const { block, share, window } = Object.fromEntries(others.map((other) => other.split('=')));
  const { device, config } = model;
  const keys = await placeCodebooks(device, randomCodebooks(config, Number(groups)));
  const prefill = hcAttentionPrefill({ blockTokens: block && Number(block) });
  const options = { keys, values, valuesOn: 'host', dtype: 'f16', maxTokens: share && Math.round(share * tokens), localWindow: window && Number(window) };
  const layers = Array.from({ length: config.layers }, (_, index) => ({ ...config, index }));
  const capacity = { device, slots: 1, tokensPerSlot: tokens, tokens, rowDType: 'f16', batchRows: maxBatchRows, prefill };
  const pool = await hostPool(device, { bytes: hcAttentionHostBytes(options, layers, capacity) });
  const policy = kvPolicy({ prefill, store: hcAttentionStore({ ...options, hostPool: pool }) });
  const close = () => {
    pool.dispose();
    keys[Symbol.dispose]();
  };
  return { policy, name: codesName({ groups, values, block, share, window }), close };
}

function codesName({ groups, values, block, share, window }) {
  const read = block === undefined ? 'prompts exact' : `prompts in blocks of ${block}`;
  const most = share === undefined ? [] : [`${100 * share} % of the tokens chosen`];
  const kept = window === undefined ? [] : [`a window of ${window} tokens`];
  return [`${groups} groups`, `${values} values on the host`, read, ...most, ...kept].join(', ');
}

/** Those of one layer serve for all. They are spread about as keys of random weights are, around 0 with a deviation of 1.2. */
function randomCodebooks({ layers, kvHeads, headDim }, groups) {
  const [centroids, books] = [8192, 1];
  let state = 1;
  const draw = () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) >>> 21;
  const half = () => halfBits(draw() + draw() + draw() + draw() - 4094);
  const centroidBits = Uint16Array.from({ length: (kvHeads * centroids * headDim) / groups }, half);
  const layer = { kvHeads, centroids: centroidBits, scale: new Float32Array(kvHeads * headDim).fill(1) };
  const training = { seed: 0, iterations: 0, batchVectors: 0, keys: 0 };
  return { model: '0'.repeat(64), headDim, groups, books, centroids, layers: Array(layers).fill(layer), training };
}

/** The f16 number that is nearest to so many 1024ths, and not above it in magnitude. */
function halfBits(count) {
  const magnitude = Math.abs(count);
  if (magnitude === 0) return 0;
  const exponent = 31 - Math.clz32(magnitude);
  const mantissa = exponent > 10 ? magnitude >> (exponent - 10) : magnitude << (10 - exponent);
  return (count < 0 ? 0x8000 : 0) | ((exponent + 5) << 10) | (mantissa & 0x3ff);
}
