import type { Stream } from '@kv/sparse-core';
import { expectThat, loadAddon, operation } from '@kv/sparse-core/native';

import { blockScoreRules, type BlockScoresArguments, expectBlockScores } from '../block-scores.js';

export interface AntidiagonalBlockScoresArguments extends BlockScoresArguments {
  /** S: how many rows, and how many keys, are one strided row or key. Default: 8. */
  readonly stride?: AntidiagonalStride | undefined;
}

export const antidiagonalStrides = [8, 16] as const;

export type AntidiagonalStride = (typeof antidiagonalStrides)[number];

const enqueue = operation('antidiagonalBlockScores', [...blockScoreRules], ['scores']);

/**
 * Estimates where the attention of the last rows of a sequence falls, from sums along antidiagonals (XAttention):
 * `scores[h, I, J] = ln(mean over the strided rows R of tile I of sum_C softmax_C(logit[R, C]))` over the strided keys C of
 * block J, with `logit[R, C] = scale / S * sum_i query[S R + S - 1 - i, h] · key[S C + i]` over i from 0 to S - 1. Sums are
 * f32; products on CUDA are of elements rounded to 11 bits, which changes nothing of f16 and bf16.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside, and counts of
 * rows or keys that are not the scores', reject the stream's next wait with an InvalidValueError
 */
export function antidiagonalBlockScores(stream: Stream, args: AntidiagonalBlockScoresArguments): void {
  enqueue(stream, args, (natives) => {
    const { stride = 8 } = args;
    expectBlockScores('antidiagonalBlockScores', args);
    expectStride('antidiagonalBlockScores', stride);
    loadAddon().antidiagonalBlockScores(stream.native, ...natives, args.scale, stride);
  });
}

/** @throws InvalidValueError */
export function expectStride(subject: string, stride: AntidiagonalStride): void {
  expectThat(subject, 'stride', stride, antidiagonalStrides.includes(stride), antidiagonalStrides.join(' or '));
}
