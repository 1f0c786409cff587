// The parts that decomposeAttention finds in the attention maps of a layer.
import { decomposeAttention, decompositionStateBytes } from '../../packages/skeleton-prefill/dist/index.js';

/** Of a prompt that is read in one step: tensors `[queryHead, token]`, which are the caller's. */
export function decomposeLayer(device, stream, { store, batch, query, rope, scale }) {
  const { queryHeads, kvHeads, headDim } = store.layer;
  const pairs = rope.inverseFrequencies.length;
  const bytes = decompositionStateBytes({ queryHeads, kvHeads, headDim, pairs });
  const zeros = (axis) => device.tensor('f32', ['queryHead', axis], [queryHeads, batch.rows]);
  const parts = { slash: zeros('lag'), vertical: zeros('key'), horizontal: zeros('row') };
  const { slots, queryStart } = batch;
  decomposeAttention(stream, {
    ...{ query, blocks: store.denseBlocks(), slots, queryStart, scale, ...parts, seenTokens: 0 },
    state: device.tensor('u8', ['byte'], [bytes]),
    inverseFrequencies: device.tensor('f32', ['pair'], [pairs], rope.inverseFrequencies),
    ...{ convention: rope.convention, attentionScale: rope.attentionScale },
  });
  return parts;
}
