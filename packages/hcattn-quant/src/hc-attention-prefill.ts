import type { PrefillAttention } from '@kv/sparse-core';
import { quantizedPrompts, quantizesPrompts } from './quantized-prompts.js';

/**
 * Attention of prompts over the codes of what came before. Each chunk of a prompt sees its own keys and values as they
 * are and earlier ones as they are held, and is quantized behind its attention. So the cache never holds a prompt
 * densely. A selection needs that: take `densePrefill()` with one, and the prompt is quantized when it is complete.
 */
export function hcAttentionPrefill(): PrefillAttention {
  const name = 'hcattn';
  return {
    name,
    capability: (asked) => (asked === quantizesPrompts.name ? {} : undefined),
    attend(stream, call) {
      quantizedPrompts.expect(call.store, name).attend(stream, call);
      return { report: { density: 1 } };
    },
  };
}
