import { embedding, linear, rmsNorm } from '@kv/sparse-core';
import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';

import type { RunnerModel } from './runner-model.js';

/** Logits of some rows. f32 `[row, vocabulary]`. */
export type Logits = TensorHandle<'f32', readonly ['row', 'vocabulary']>;

/** What goes into the head, f32 `[row, hidden]`. */
export type NormedRows = TensorHandle<'f32', readonly ['row', 'hidden']>;

export interface FinalRows {
  /** What the last layer made of all rows, `[token, hidden]`. */
  readonly hidden: TensorHandle<FloatDType, readonly ['token', 'hidden']>;
  /** Which of them go through the head, i32 `[row]`. */
  readonly chosen: TensorHandle<'i32', readonly ['row']>;
  readonly normed: NormedRows;
}

/** Enqueues `normed = norm(hidden[chosen])`. */
export function enqueueFinalNorm(stream: Stream, model: RunnerModel, { hidden, chosen, normed }: FinalRows): void {
  embedding(stream, { table: hidden, ids: chosen, output: normed });
  const epsilon = model.config.rmsNormEpsilon;
  rmsNorm(stream, { input: normed, weight: model.weights.finalNorm, output: normed, epsilon });
}

export interface HeadRows {
  readonly normed: NormedRows;
  readonly logits: Logits;
  /** i32 `[row]`: how many of the first rows are wanted. Default: all. */
  readonly count?: TensorHandle<'i32', readonly ['row']> | undefined;
}

/** Enqueues `logits = head(normed)`. */
export function enqueueLogits(stream: Stream, model: RunnerModel, { normed, logits, count }: HeadRows): void {
  linear(stream, { input: normed, rows: count, weight: model.weights.head, output: logits });
}
