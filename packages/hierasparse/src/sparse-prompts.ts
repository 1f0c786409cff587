import type { AttentionCall, Stream } from '@kv/sparse-core';
import { Capability } from '@kv/sparse-core/native';
import type { BlockSparsity, Shares } from './block-sparsity.js';

/** What a store does for `hieraSparsePrefill`. */
export interface SparsePrompts {
  /**
   * Attention of the rows of prompts over all that their slots hold, of which this share is made sparse first.
   * @throws CapabilityError unless the store was made for prompts of this sparsity
   */
  attend(stream: Stream, call: AttentionCall, sparsity: Shares): void;
}

export const sparsePrompts = new Capability<SparsePrompts>(
  'hierasparse: prompts in sparse blocks',
  'hieraSparseStore()',
);

/** What a prefill attention tells the store that sizes itself by it. */
export const promptSparsity = new Capability<BlockSparsity>(
  'hierasparse: sparsity of prompts',
  'hieraSparsePrefill()',
);
