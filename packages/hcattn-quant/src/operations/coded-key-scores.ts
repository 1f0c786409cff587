import type { Stream } from '@kv/sparse-core';
import { attentionSettings, loadAddon, operation } from '@kv/sparse-core/native';
import type { CodedKeys } from '../coded-keys.js';
import { codedKeyRules, expectCodedKeys } from './block-arguments.js';
import { expectKeyScores, expectRanges, type KeyScoresArguments, rangesRule, type ScoreRanges, scoredRules, tableRules } from './key-scores.js';

export interface CodedKeyScoresArguments extends CodedKeys, KeyScoresArguments {
  /** Written where given: `selectByMass` then reads the scores once less. */
  readonly ranges?: ScoreRanges | undefined;
}

/** In the order of `native/bindings/coded-key-scores.binding.cc`. */
const rules = [...scoredRules, ...codedKeyRules, rangesRule, ...tableRules] as const;

const enqueue = operation('codedKeyScores', rules, ['scores', 'ranges']);

/**
 * Scores of every row and query head with every coded token of the row's slot, straight from the codes (HCAttention,
 * equation 3): `scores[t, h, j] = scale * sum_g (channelScale * q)_g . centroid[code(j, g)]`, for j below the kv head's
 * `keyCounts`; other scores are not written. Sums are f32. On CUDA, 16-bit queries of 64 or 128 dims over one book of
 * sub-vectors of 2 or 4 dims are rounded to f16, relative to their largest dim, where they are multiplied by
 * `channelScale` or are bf16. A NaN of a query shows in the scores of its own row and
 * head, and a key that was not finite in all scores with its token.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 * @throws CapabilityError for codes of more than 16 bits, heads of more than 512 dims, more than 8192 centroids; tables that
 * lead outside, and counts that are no multiples of 64, reject the stream's next wait with an InvalidValueError
 */
export function codedKeyScores(stream: Stream, args: CodedKeyScoresArguments): void {
  enqueue(stream, args, ([query, scores, codes, centroids, channelScale, ranges, ...batch], [rows]) => {
    const name = 'codedKeyScores';
    expectCodedKeys(name, rows.shape[2], args);
    expectKeyScores(name, args);
    expectRanges(name, args.ranges);
    const [scale] = attentionSettings(name, { scale: args.scale });
    loadAddon().codedKeyScores(stream.native, query, scores, codes, centroids, channelScale, args.codeBits, ranges, ...batch, scale);
  });
}
