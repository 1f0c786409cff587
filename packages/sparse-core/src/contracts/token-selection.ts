import type { TensorHandle } from '../handles.js';

/** The tokens that a layer keeps of one sequence, as indices into what its store holds. */
export interface TokenSelection {
  /** i32 `[kvHead, kept]`: each row ascending and without repeats; the first `counts[kvHead]` are valid. */
  readonly indices: TensorHandle<'i32', readonly ['kvHead', 'kept']>;
  /** How many tokens each kv head keeps. */
  readonly counts: readonly number[];
}

/** i32 `[kvHead]`: 1 where a selection's indices do not ascend or lie outside the slot, else 0. */
export type SelectionOutcomes = TensorHandle<'i32', readonly ['kvHead']>;
