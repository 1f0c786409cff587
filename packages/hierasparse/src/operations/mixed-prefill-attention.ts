import type { Stream } from '@kv/sparse-core';
import { mixedAttention, type MixedAttentionArguments } from './mixed-attention-arguments.js';

const enqueue = mixedAttention('mixedPrefillAttention');

/**
 * What `prefillAttention` computes, over blocks of which some are 2:4 sparse, read without writing them out
 * (HieraSparse, algorithm 1). A token block's keys and values may be of different kinds. Over dense blocks alone the
 * result is that of `prefillAttention`, bit for bit, on the CPU.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead
 * outside reject the stream's next wait with an InvalidValueError
 */
export function mixedPrefillAttention(stream: Stream, args: MixedAttentionArguments): void {
  enqueue(stream, args);
}
