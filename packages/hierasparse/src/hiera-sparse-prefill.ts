import { CapabilityError, type PrefillAttention, type PrefillCall, type PrefillReport, type Stream } from '@kv/sparse-core';
import { type BlockSparsity, nameOf, sharesOf } from './block-sparsity.js';
import { MixedBlockStore } from './store/mixed-block-store.js';

/**
 * Attention of prompts over mixed blocks (HieraSparse, algorithm 1): before it, full blocks of the prompt so far, the
 * chunk's own too, are made sparse up to this share, sinks and local window excepted. The store may prune further when
 * the prompt ends; its own sparsity is at least this one.
 * @throws InvalidValueError when a share is not between 0 and 1
 */
export function hieraSparsePrefill(sparsity: BlockSparsity = {}): PrefillAttention {
  sharesOf(sparsity, 0);
  return new HieraSparsePrefill(sparsity);
}

export class HieraSparsePrefill implements PrefillAttention {
  readonly name: string;
  readonly sparsity: BlockSparsity;

  constructor(sparsity: BlockSparsity) {
    this.name = nameOf(sparsity);
    this.sparsity = sparsity;
  }

  attend(stream: Stream, call: PrefillCall): PrefillReport {
    const { store } = call;
    if (!(store instanceof MixedBlockStore)) {
      throw new CapabilityError(
        `The prefill attention '${this.name}' makes blocks of its store sparse, which the store '${store.name}' cannot. ` +
          'Give kvPolicy() a hieraSparseStore() with it.',
        { subject: 'prefill', given: store.name, wanted: 'hieraSparseStore' },
      );
    }
    store.attend(stream, call, sharesOf(this.sparsity, store.layer.index));
    return { density: 1 };
  }
}
