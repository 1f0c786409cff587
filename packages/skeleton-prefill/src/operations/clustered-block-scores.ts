import type { Stream } from '@kv/sparse-core';
import { loadAddon, operation } from '@kv/sparse-core/native';

import { blockScoreRules, type BlockScoresArguments, expectBlockScores } from '../block-scores.js';

const enqueue = operation('clusteredBlockScores', [...blockScoreRules], ['scores']);

/**
 * Estimates where the attention of the last rows of a sequence falls, from 8 clusters of the keys of each block:
 * `scores[h, I, J] = ln(mean of softmax_J(logit[i, J]))` over every second row i of tile I, with `logit[i, J] = max_c (scale *
 * query[i, h] · mean of key[j] over cluster c of block J + ln(its number of keys))` for the blocks J whose first key row i
 * sees. Clusters have the keys nearest to their seeds; each seed is the key farthest from those before it, the first one
 * the key farthest from the block's mean. Sums are f32; products on CUDA are of elements rounded to 11 bits, which changes
 * nothing of f16 and bf16 queries. A row that is not scored makes no score NaN.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError; tables that lead outside, and counts of
 * rows or keys that are not the scores', reject the stream's next wait with an InvalidValueError
 */
export function clusteredBlockScores(stream: Stream, args: BlockScoresArguments): void {
  enqueue(stream, args, (natives) => {
    expectBlockScores('clusteredBlockScores', args);
    loadAddon().clusteredBlockScores(stream.native, ...natives, args.scale);
  });
}
