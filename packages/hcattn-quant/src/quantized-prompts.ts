import type { AttentionCall, Stream } from '@kv/sparse-core';
import { Capability } from '@kv/sparse-core/native';

/** What a store does for `hcAttentionPrefill`. */
export interface QuantizedPrompts {
  /**
   * Attention of the rows of prompts over what they see of their slots, which is quantized behind it.
   * @returns the share of the causal scores that was computed
   */
  attend(stream: Stream, call: AttentionCall): number;
}

export const quantizedPrompts = new Capability<QuantizedPrompts>(
  'hcattn: prompts in quantized blocks',
  'hcAttentionStore()',
);

/** How a prompt is read. */
export interface PromptReading {
  /** Tokens of a block: rows see the first block and their own. Undefined where they see all. */
  readonly blockTokens?: number | undefined;
}

/** What a prefill attention tells the store that sizes itself by it: prompts need not stay dense to their end. */
export const quantizesPrompts = new Capability<PromptReading>(
  'hcattn: prompts are quantized while they are read',
  'hcAttentionPrefill()',
);
