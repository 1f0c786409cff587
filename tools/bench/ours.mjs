// This project's own runner, behind the interface that the peers have: see peers/llama-cpp.mjs.
import { join } from 'node:path';
import { hcAttentionPrefill, hcAttentionStore } from '../../packages/hcattn-quant/dist/index.js';
import { createDevice } from '../../packages/sparse-core/dist/index.js';
import { generateTokens, Model } from '../../packages/model/dist/index.js';

/** Opens a Hugging Face directory on the CPU with a dense f16 cache, or with keys and values in codes of `codec`. */
export async function open({ model, threads, contextTokens, codec }) {
  const device = createDevice({ threads });
  const opened = await Model.open(model.directory, { device });
  const inCodes = codec && {
    prefill: hcAttentionPrefill(),
    store: hcAttentionStore({ keys: codec, values: codec, valuesOn: 'device' }),
  };
  const runner = opened.createRunner({ contextTokens, ...inCodes });
  return {
    weights: join(model.directory, 'model.safetensors'),
    async *generate(promptIds, count) {
      for await (const { id } of generateTokens(runner, promptIds, { maxTokens: count, endIds: [] }))
        yield id;
    },
    close() {
      runner.dispose();
      opened.dispose();
    },
  };
}
