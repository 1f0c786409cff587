import type { PrefillAttention } from '@kv/sparse-core';
import { endsUndense, expectOptions, expectThat } from '@kv/sparse-core/native';
import { blockTokens as cacheBlockTokens } from './quantized-blocks.js';
import { type PromptReading, quantizedPrompts, quantizesPrompts } from './quantized-prompts.js';

export interface HcAttentionPrefillOptions {
  /**
   * Reads a text in blocks of so many tokens, a multiple of 64: a row sees the first block and its own (appendix B).
   * Default: a row sees all.
   */
  readonly blockTokens?: number | undefined;
}

const capabilities: ReadonlySet<string> = new Set([quantizesPrompts.name, endsUndense.name]);

/**
 * Attention of prompts that are quantized while they are read, so that the cache never holds one densely. Where values are on
 * the host, a sequence's first prompt is read exactly: its keys are on the host too until it is complete, and keys and values
 * come over the link as they are. Where codes are on the device, and in a later prompt, each chunk sees its own keys and
 * values as they are, and earlier ones as codes say them. A later prompt sees all that was there before it.
 *
 * A selection needs dense prompts, and is refused by name: take `densePrefill()` with one, and the prompt is quantized when it is complete.
 * @throws InvalidValueError when an option is none
 */
export function hcAttentionPrefill(options: HcAttentionPrefillOptions = {}): PrefillAttention {
  expectOptions('hcAttentionPrefill', options, { blockTokens: true });
  const { blockTokens } = options;
  const isWhole = blockTokens === undefined || (Number.isSafeInteger(blockTokens) && blockTokens > 0 && blockTokens % cacheBlockTokens === 0);
  expectThat('hcAttentionPrefill', 'blockTokens', blockTokens, isWhole, `a multiple of ${cacheBlockTokens}`);
  const reading: PromptReading = { blockTokens };
  const name = blockTokens === undefined ? 'hcattn' : `hcattn by ${blockTokens}`;
  return {
    name,
    capability: (asked) => (capabilities.has(asked) ? reading : undefined),
    expectStore: (store) => void quantizedPrompts.expect(store, name),
    attend(stream, call) {
      return { report: { density: quantizedPrompts.expect(call.store, name).attend(stream, call) } };
    },
  };
}
