import type { AttentionCall, Stream } from '@kv/sparse-core';
import { Capability } from '@kv/sparse-core/native';

/** What a store does for `hcAttentionPrefill`. */
export interface QuantizedPrompts {
  /** Attention of the rows of prompts over all that their slots hold, which is quantized behind it. */
  attend(stream: Stream, call: AttentionCall): void;
}

export const quantizedPrompts = new Capability<QuantizedPrompts>(
  'hcattn: prompts in quantized blocks',
  'hcAttentionStore()',
);

/** What a prefill attention tells the store that sizes itself by it: prompts need not stay dense to their end. */
export const quantizesPrompts = new Capability<object>(
  'hcattn: prompts are quantized while they are read',
  'hcAttentionPrefill()',
);
