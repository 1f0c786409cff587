import type { TensorHandle } from '@kv/sparse-core';

import type { Sequence } from './sequence.js';

/**
 * `prefill`: a chunk of a prompt; `prefill-end`: its last chunk, after which the policy may drop tokens;
 * `decode`: one token of an answer.
 */
export type Phase = (typeof phases)[number];
export const phases = ['prefill', 'prefill-end', 'decode'] as const;

/** Token ids that the device has just chosen: a step on them can be enqueued before anybody knows them. */
export type DeviceIds = TensorHandle<'i32', readonly ['token']>;

/** One sequence's next tokens. */
export interface BatchEntry {
  readonly sequence: Sequence;
  readonly ids: ArrayLike<number> | DeviceIds;
  readonly phase: Phase;
}

/** How many tokens an entry contributes. */
export function countTokens({ ids }: BatchEntry): number {
  return 'dtype' in ids ? ids.shape[0] : ids.length;
}

/** Counts the tokens of an entry whose last layer is enqueued. */
export function leave(entry: BatchEntry): void {
  const { sequence, ids, phase } = entry;
  sequence.leave(countTokens(entry), 'dtype' in ids ? undefined : ids, phase !== 'decode');
}
