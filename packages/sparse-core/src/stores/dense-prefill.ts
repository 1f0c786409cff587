import type { PrefillAttention } from '../contracts/prefill-attention.js';
import { CapabilityError } from '../errors.js';
import { prefillAttention } from '../operations/prefill-attention.js';

/** Exact causal attention of every row over all that its slot holds. */
export function densePrefill(): PrefillAttention {
  return {
    name: 'dense',
    attend(stream, call) {
      const { store, batch, query, output, scale } = call;
      const blocks = store.denseBlocks(batch.entries.map(({ slot }) => slot));
      if (blocks === undefined && store.attend) {
        store.attend(stream, call);
        return { report: { density: 1 } };
      }
      if (blocks === undefined) {
        throw new CapabilityError(
          `Dense prefill reads dense blocks, which the store '${store.name}' does not keep. ` +
            "Choose that store's own prefill attention in kvPolicy().",
          { subject: 'prefill', given: store.name, wanted: 'dense blocks' },
        );
      }
      const { slots, queryStart } = batch;
      prefillAttention(stream, { query, output, blocks, slots, queryStart, scale, causal: true });
      return { report: { density: 1 } };
    },
  };
}
