import type { FloatDType } from './dtype.js';
import type { TensorHandle } from './handles.js';

/**
 * Dense keys and values in blocks, as the attention operations read them (`native/shared/paged/paged-attention.h`).
 * A contiguous tensor is the special case of one block that is as long as the tensor.
 */
export interface PagedBlocks {
  /** `[block, blockToken, dim]`: consecutive tokens of one kv head. */
  readonly keys: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** `[block, blockToken, dim]`, of the same tokens as `keys`. */
  readonly values: TensorHandle<FloatDType, readonly ['block', 'blockToken', 'dim']>;
  /** i32: the block that holds the n-th run of `blockToken` tokens. */
  readonly blockTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
  /** i32: how many tokens each kv head of each slot holds. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
}
