// How benchmarks see the attention of a prompt, layer by layer.
import { prefill } from '../../packages/model/dist/index.js';
import { densePrefill, kvPolicy } from '../../packages/sparse-core/dist/index.js';

/** Reads a prompt. `see` gets the stream and the attention call of every layer, and may keep what it reads of them. */
export async function readPrompt(model, ids, see, { attention = densePrefill(), maxBatchRows = ids.length, onReport } = {}) {
  const reading = {
    ...attention,
    attend(stream, call) {
      see(stream, call);
      return attention.attend(stream, call);
    },
  };
  const runner = model.createRunner({ policy: kvPolicy({ prefill: reading }), contextTokens: ids.length, maxBatchRows });
  const logits = await prefill(runner, runner.openSequence(), ids, { onReport });
  await logits.read();
  logits.dispose();
  runner.dispose();
}

/** Queries `[token, queryHead, dim]` and keys `[token, kvHead, dim]` of each layer. */
export async function queriesAndKeys(model, ids) {
  const reads = [];
  await readPrompt(model, ids, (stream, { query, keys }) => void reads.push(Promise.all([query.read(stream), keys.read(stream)])));
  return Promise.all(reads);
}
