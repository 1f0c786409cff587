import type { Stream } from '@kv/sparse-core';
import { attention24, type Attention24Arguments } from './attention-24-arguments.js';

const enqueue = attention24('prefillAttention24');

/**
 * What `prefillAttention` computes, over blocks of which some are 2:4 sparse, read without writing them out
 * (HieraSparse, algorithm 1). A token block's keys and values may be of different kinds. Over dense blocks alone the
 * result is that of `prefillAttention`, bit for bit, on the CPU.
 * @throws CapabilityError, ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead
 * outside reject the stream's next wait with an InvalidValueError
 */
export function prefillAttention24(stream: Stream, args: Attention24Arguments): void {
  enqueue(stream, args);
}
