import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';

import { blockScoreRules, type BlockScoresArguments, expectBlockScores } from '../block-scores.js';

const enqueue = operation('verticalSlashBlockScores', [...blockScoreRules], ['scores']);

/**
 * Estimates where the attention of the last rows of a sequence falls, from the vertical and slash lines that its last 64
 * rows see (MInference): `scores[h, I, J]` is the logarithm of the largest of the lines that cross tile I and block J, of
 * `vertical[h, j] = mean_i a[i, j]` and `slash[h, l] = mean_i a[i, i - l]` with the exact attention a of these rows. Attention
 * below 2^-126 counts as nothing. Sums are f32; products on CUDA are of elements rounded to 11 bits, which changes nothing
 * of f16 and bf16.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside, and counts of
 * rows or keys that are not the scores', reject the stream's next wait with an InvalidValueError
 */
export function verticalSlashBlockScores(stream: Stream, args: BlockScoresArguments): void {
  enqueue(stream, args, (natives) => {
    expectBlockScores('verticalSlashBlockScores', args);
    loadAddon().verticalSlashBlockScores(stream.native, ...natives, args.scale);
  });
}
