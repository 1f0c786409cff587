import type { FloatDType } from '../dtype.js';
import type { KvStore } from './kv-store.js';
import type { TokenSelection } from './token-selection.js';
import type { Stream, TensorHandle } from '../handles.js';

export interface SelectCall {
  readonly store: KvStore;
  readonly slot: number;
  /**
   * `[token, queryHead, dim]`, after RoPE: the last queries of the prompt, whatever the chunk sizes were. In a later turn
   * the prompt is what was read since the last answer: a short question has as many queries as it has tokens.
   */
  readonly lastQueries: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** Scores are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /**
   * All tokens that the sequence has had, this prompt's included. In a later turn the store holds fewer: those that
   * earlier selections kept, and what came since.
   */
  readonly tokens: number;
}

/** Chooses, after the last chunk of a prompt, which tokens a layer keeps. */
export interface KvSelector {
  readonly name: string;
  /** How many of the prompt's last queries it wants to see; 0 for none. */
  readonly observationWindow: number;
  /**
   * Undefined keeps everything. The selection's tensor belongs to the caller. A selector whose counts depend on
   * what is on the device returns a promise, for a store frees blocks by counts that the host knows.
   */
  select(stream: Stream, call: SelectCall): TokenSelection | undefined | Promise<TokenSelection | undefined>;
}
