import type { FloatDType } from '../dtype.js';
import type { RopeDescription } from '../operations/rope-description.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import type { KvStore } from './kv-store.js';
import type { RowBatch } from './row-batch.js';

export interface PrefillCall {
  /** Already holds the chunk's own keys and values behind the earlier ones. */
  readonly store: KvStore;
  readonly batch: RowBatch;
  /** `[token, queryHead, dim]`, after RoPE. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** The chunk's own keys and values, `[token, kvHead, dim]`, keys after RoPE. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** How `query` and `keys` were rotated, for methods that undo it. */
  readonly rope: RopeDescription;
  /** The shape of `query`. */
  readonly output: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  readonly scale: number;
}

/** What a method did, for the user's table. */
export interface PrefillReport {
  /** Share of the causal scores that was computed, 0 to 1. */
  readonly density: number;
  /** Estimated share of the softmax mass in what was computed. */
  readonly estimatedMass?: number | undefined;
  /** Bound of the output's error that the method guarantees. */
  readonly errorBound?: number | undefined;
  /** Why the method computed everything instead of skipping, if it did. */
  readonly fallback?: string | undefined;
}

/** Computes the attention of a prompt, or of a chunk of one with the earlier chunks' keys present. */
export interface PrefillAttention {
  readonly name: string;
  /**
   * Enqueues the attention of every row of the batch.
   * @throws CapabilityError when the store does not hold what the method reads
   */
  attend(stream: Stream, call: PrefillCall): PrefillReport | Promise<PrefillReport>;
}
