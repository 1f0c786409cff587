import type { FloatDType } from '../dtype.js';
import type { Device, Stream, TensorHandle } from '../handles.js';
import type { RowTurn } from '../operations/append-kv.js';
import type { PagedBlocks } from '../paged-blocks.js';
import type { Capable } from './capability.js';
import type { RowBatch } from './row-batch.js';
import type { SelectionOutcomes, TokenSelection } from './token-selection.js';

/** What a store needs to know of the layer whose keys and values it holds. */
export interface KvLayer {
  readonly index: number;
  readonly queryHeads: number;
  /** Divides `queryHeads`. Storage is per kv head, never repeated. */
  readonly kvHeads: number;
  readonly headDim: number;
}

/** How much a cache must be able to hold. */
export interface KvCapacity {
  readonly device: Device;
  /** Sequences at the same time. */
  readonly slots: number;
  /** Tokens of the longest sequence. */
  readonly tokensPerSlot: number;
  /** Tokens of all sequences together. */
  readonly tokens: number;
  /** Element type of the keys, values and queries that will come. Default: f32. */
  readonly rowDType?: FloatDType | undefined;
  /** Rows of the largest step. Default: `tokens`. */
  readonly batchRows?: number | undefined;
  /** The bits of an answer shall not depend on the others of its step, which a store with the capability `answersApart` heeds. */
  readonly answersApart?: boolean | undefined;
  /** How prompts will be computed, for a store that sizes itself by it. Default: dense attention. */
  readonly prefill?: Capable | undefined;
}

/** Bytes of memory, by where it is. */
export interface KvBytes {
  /** On the device; on the CPU what would be there with a GPU. */
  readonly device: number;
  /** In host memory, and counted apart on the CPU too. */
  readonly host: number;
}

export interface AppendCall {
  readonly batch: RowBatch;
  /** `[token, kvHead, dim]`, after RoPE with the true positions unless `rope` is given. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** `[token, kvHead, dim]` */
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** The store turns the queries and the keys by it first, in place. `appendKv` does so, and `rope` for other stores. */
  readonly rope?: RowTurn | undefined;
}

/** Rows that attend to what their slots hold, their own keys included. */
export interface AttentionCall {
  readonly batch: RowBatch;
  /** `[token, queryHead, dim]`, after RoPE. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** The shape of `query`. */
  readonly output: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** Scores are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
}

/** How often the decode steps of a slot found what they read at hand, for a scheduler. */
export interface KvDemand {
  /** How many decode steps of the slot are counted here. */
  readonly step: number;
  /** Blocks that the newest of them read, each counted once. How many steps those are is the store's to say. */
  readonly workingSet: number;
  /** Blocks that were in device memory when a step read them. */
  readonly hits: number;
  /** Blocks that had to come from the host. */
  readonly misses: number;
}

/** Enqueues what remains of a decode step; `output` is valid after it, in stream order. */
export type FinishDecode = () => void;

/**
 * Holds one layer's keys and values for many sequences. Slots are numbered by the caller; a fresh or
 * released slot is empty. All calls on one store use the same stream, in whose order they take effect.
 */
export interface KvStore extends Capable {
  readonly layer: KvLayer;
  /**
   * Makes room for the rows of a step, before any of its work is enqueued. Whatever depends on how many tokens
   * the slots hold is done here: a store whose blocks live in two memories plans which ones the step needs and
   * starts their loads; one that compresses blocks as they fill enqueues that.
   * @throws OutOfMemoryError when they do not fit; nothing is changed
   */
  prepare(stream: Stream, batch: RowBatch): void;
  /**
   * Enqueues the adding of a step's keys and values behind those of its sequences. Old tokens are never moved.
   * Counts nothing: a recorded step comes here once, and `prepare` and `advance` at every replay.
   * @throws InvalidValueError when `prepare` made no room for them; nothing is enqueued
   */
  append(stream: Stream, call: AppendCall): void;
  /** Counts a step's rows, whose `append` is enqueued. Enqueues nothing. */
  advance(batch: RowBatch): void;
  /**
   * Exact causal attention of the rows of prompts over all that their slots hold, by a store that holds them otherwise
   * than in dense blocks. One that always has `denseBlocks` needs none.
   */
  attend?(stream: Stream, call: AttentionCall): void;
  /**
   * Attention of one new row per sequence over all that its slot holds. A store that computes part of it
   * elsewhere (values on the host) starts that here; the caller may enqueue other work before it finishes.
   * `append` and this enqueue the same operations for a batch of the same size, whatever its slots and lengths.
   */
  startDecode(stream: Stream, call: AttentionCall): FinishDecode;
  /**
   * The same where `denseBlocks` of the slots is all that they hold, for a store that has less to do then. Recorded steps are
   * recorded in either way; which one is replayed is asked behind `prepare`.
   */
  decodeDense?(stream: Stream, call: AttentionCall): void;
  /**
   * Told that tokens of a slot are about to be selected. A store that holds some otherwise than in dense blocks reads
   * what it needs, and returns the function that enqueues making them dense, so that `denseBlocks` and `keep` serve.
   * Undefined when there is nothing to do, or nothing that can be done.
   * @throws OutOfMemoryError from that function, when there is no room; the slot can only be released then
   */
  makeDense?(stream: Stream, slot: number): Promise<() => void> | undefined;
  /**
   * Keeps only the selected tokens of a slot and returns the memory of the others that no other slot shares.
   * @param outcomes i32 `[kvHead]`, as `gatherKv` takes them: whether the device found the selection in order
   * @throws InvalidValueError when more is to be kept than there is; nothing is changed
   * @throws OutOfMemoryError when there is no room for what it shared with other slots; nothing is changed
   */
  keep(stream: Stream, slot: number, selection: TokenSelection, outcomes?: SelectionOutcomes): void;
  /**
   * Forgets the newest tokens of a slot and returns the memory behind the others, also what `prepare` took for tokens
   * that never came. None of the forgotten was there when `keep` or `finishPrefill` was last called.
   * @throws InvalidValueError when the slot holds fewer; nothing is changed
   */
  truncate(stream: Stream, slot: number, tokens: number): void;
  /** Told that a sequence's prompt is complete: a store that compresses more after prefill does it here. */
  finishPrefill?(stream: Stream, slot: number): void;
  /** The newest counts of a slot that have arrived from the device; never waits. Undefined before the first. */
  demand?(slot: number): KvDemand | undefined;
  /**
   * Gives back the device memory of a slot whose tokens are in host memory too. They come back when they are read: what a
   * sequence answers is the same.
   */
  evict?(stream: Stream, slot: number): void;
  /**
   * Says how many tokens of each kv head the answers of a slot read from now on; undefined: as many as the store's own budget.
   * A recorded step reads it from device memory. `copy` leaves it behind, and `release` undoes it.
   * @throws InvalidValueError for more than the store's own, or less than what is always read; nothing is changed
   */
  setBudget?(stream: Stream, slot: number, budgetTokens: number | undefined): void;
  /**
   * Makes an empty slot hold what another holds, without its newest `dropped` tokens; default: with them. The two share
   * the blocks that are full, and what writes to such a block later works on one of its own. A store without it cannot
   * be forked.
   * @throws OutOfMemoryError when there is no room for what they do not share; nothing is changed
   * @throws InvalidValueError when the slot holds fewer tokens, or the other one is not empty; nothing is changed
   * @throws CapabilityError when the store cannot hold what is left; nothing is changed
   */
  copy?(stream: Stream, fromSlot: number, toSlot: number, dropped?: number): void;
  /**
   * Empties a slot and returns its memory. Of an empty slot it says so again: what said it before may have been skipped by a
   * stream that failed.
   */
  release(stream: Stream, slot: number): void;
  /** Tokens that a slot holds, per kv head. */
  lengths(slot: number): readonly number[];
  /** The cache as dense blocks, or undefined when this store keeps any of these slots otherwise. Default: of all slots. */
  denseBlocks(slots?: readonly number[]): PagedBlocks | undefined;
  /** What the tokens of these slots take now, a block that several share counted once. Default: of all slots. */
  bytes(slots?: readonly number[]): KvBytes;
  /** What the store took when it was made, in use or not: its part of pools that layers share, and its tables. */
  reserved(): KvBytes;
  dispose(): void;
}

/** Makes the stores of a model's layers, which may share pools. */
export interface KvStoreFactory {
  readonly name: string;
  /** @throws OutOfMemoryError, CapabilityError */
  create(layers: readonly KvLayer[], capacity: KvCapacity): KvStore[];
}
