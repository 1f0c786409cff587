import type { FloatDType } from '../dtype.js';
import type { RopeDescription } from '../operations/rope-description.js';
import type { Capable } from './capability.js';
import type { AttentionCall, KvBytes, KvCapacity, KvLayer, KvStore } from './kv-store.js';
import type { Stream, TensorHandle } from '../handles.js';

export interface PrefillCall extends AttentionCall {
  /** Already holds the chunk's own keys and values behind the earlier ones. */
  readonly store: KvStore;
  /** What the method keeps of this layer between chunks, if it has `open`. */
  readonly state: PrefillState | undefined;
  /** Of each entry of the batch: whether its prompt ends with these rows. */
  readonly endsPrompt: readonly boolean[];
  /** The chunk's own keys and values, `[token, kvHead, dim]`, keys after RoPE. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** `[token, kvHead, dim]` */
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** How `query` and `keys` were rotated, for methods that undo it. */
  readonly rope: RopeDescription;
}

/**
 * What a method keeps of the prompts of one layer between their chunks, slot by slot, such as running sums. A fresh or
 * released slot is empty. All calls use the stream of `attend`, in whose order they take effect.
 */
export interface PrefillState {
  /**
   * Makes an empty slot hold what another holds: a prompt was forked before its end.
   * @throws OutOfMemoryError; nothing is changed then
   */
  copy(stream: Stream, fromSlot: number, toSlot: number): void;
  /** Empties a slot, whose sequence was disposed; it may be empty already. */
  release(stream: Stream, slot: number): void;
  /** What it takes now. A runner counts it among the bytes of its cache. */
  bytes(): KvBytes;
  dispose(): void;
}

/** What a method did, for the user's table. */
export interface PrefillReport {
  /** Share of the causal scores that was computed, 0 to 1. */
  readonly density: number;
  /** Estimated share of the softmax mass in what was computed. */
  readonly estimatedMass?: number | undefined;
  /** Bound of the output's error that the method guarantees. */
  readonly errorBound?: number | undefined;
  /** Why the method computed all of a step, or of some heads, instead of skipping, if it did. */
  readonly fallback?: string | undefined;
}

/** Attention whose work is enqueued. */
export interface Attended {
  /** A promise where the device alone knows what was done. Nobody waits for it before going on. */
  readonly report: PrefillReport | Promise<PrefillReport>;
}

/** Computes the attention of a prompt, or of a chunk of one with the earlier chunks' keys present. */
export interface PrefillAttention extends Capable {
  /**
   * Makes what the method keeps of a layer between chunks. A method without it keeps nothing.
   * @throws OutOfMemoryError, CapabilityError
   */
  open?(layer: KvLayer, capacity: KvCapacity): PrefillState;
  /**
   * Asked of each layer's store when a runner is made, so that what is refused is refused before the first prompt.
   * @throws CapabilityError when the store can never hold what the method reads
   */
  expectStore?(store: KvStore): void;
  /**
   * Enqueues the attention of every row of the batch, and returns without waiting for the device.
   * @throws CapabilityError when the store does not hold what the method reads
   */
  attend(stream: Stream, call: PrefillCall): Attended;
}
