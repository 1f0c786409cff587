import { embedding, linear, rmsNorm } from '@kv/sparse-core';
import type { FloatDType, Stream, TensorHandle } from '@kv/sparse-core';

import type { RunnerModel } from './runner-model.js';

/** Logits of some rows. f32 `[row, vocabulary]`. */
export type Logits = TensorHandle<'f32', readonly ['row', 'vocabulary']>;

export interface HeadRows {
  /** What the last layer made of all rows, `[token, hidden]`. */
  readonly hidden: TensorHandle<FloatDType, readonly ['token', 'hidden']>;
  /** Which of them go through the head, i32 `[row]`. */
  readonly chosen: TensorHandle<'i32', readonly ['row']>;
  /** Working memory, f32 `[row, hidden]`. */
  readonly normed: TensorHandle<'f32', readonly ['row', 'hidden']>;
  readonly logits: Logits;
  /** i32 `[row]`: how many of the first chosen rows are wanted. Default: all. */
  readonly count?: TensorHandle<'i32', readonly ['row']> | undefined;
}

/** Enqueues `logits = head(norm(hidden[chosen]))`. */
export function enqueueHead(stream: Stream, model: RunnerModel, { hidden, chosen, normed, logits, count }: HeadRows): void {
  const { finalNorm, head } = model.weights;
  const epsilon = model.config.rmsNormEpsilon;
  embedding(stream, { table: hidden, ids: chosen, output: normed });
  rmsNorm(stream, { input: normed, weight: finalNorm, output: normed, epsilon });
  linear(stream, { input: normed, rows: count, weight: head, output: logits });
}
