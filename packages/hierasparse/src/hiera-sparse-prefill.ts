import type { PrefillAttention } from '@kv/sparse-core';
import { expectOptions } from '@kv/sparse-core/native';
import { type BlockSparsity, nameOf, sharesOf, sparsityOptions } from './block-sparsity.js';
import { promptSparsity, sparsePrompts } from './sparse-prompts.js';

/**
 * Attention of prompts over dense and 2:4 blocks (HieraSparse, algorithm 1): before it, full blocks of the prompt so far, the
 * chunk's own too, are made sparse up to this share, sinks and local window excepted. The store may prune further when
 * the prompt ends; its own sparsity is at least this one.
 * @throws InvalidValueError when a share is not between 0 and 1
 */
export function hieraSparsePrefill(sparsity: BlockSparsity = {}): PrefillAttention {
  expectOptions('hieraSparsePrefill', sparsity, sparsityOptions);
  sharesOf(sparsity, 0);
  const name = nameOf(sparsity);
  return {
    name,
    capability: (asked) => (asked === promptSparsity.name ? sparsity : undefined),
    expectStore: (store) => void sparsePrompts.expect(store, name),
    attend(stream, call) {
      const { store } = call;
      sparsePrompts.expect(store, name).attend(stream, call, sharesOf(sparsity, store.layer.index));
      return { report: { density: 1 } };
    },
  };
}
