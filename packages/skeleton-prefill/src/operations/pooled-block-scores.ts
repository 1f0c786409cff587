import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';

import { blockScoreRules, type BlockScoresArguments, expectBlockScores } from '../block-scores.js';

const enqueue = operation('pooledBlockScores', [...blockScoreRules], ['scores']);

/**
 * Estimates where the attention of the last rows of a sequence falls, from the mean key of each block (FlashPrefill):
 * `scores[h, I, J] = ln(energy[I, J] / sum_J' energy[I, J'])` with `energy[I, J]` the sum of `exp(scale * query[i, h] ·
 * mean of key[j] over block J)` over the rows i of tile I that see the block's first key. Sums are f32; products on CUDA
 * are of elements rounded to 11 bits, which changes nothing of f16 and bf16.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside, and counts of
 * rows or keys that are not the scores', reject the stream's next wait with an InvalidValueError
 */
export function pooledBlockScores(stream: Stream, args: BlockScoresArguments): void {
  enqueue(stream, args, (natives) => {
    expectBlockScores('pooledBlockScores', args);
    loadAddon().pooledBlockScores(stream.native, ...natives, args.scale);
  });
}
