import type { Stream } from '@kv/sparse-core';
import { attentionSettings, expectBoolean, expectShape, loadAddon, operation } from '@kv/sparse-core/native';
import { type CodeBits, quantizedBlockBytes, type QuantizedBlocks } from '../quantized-blocks.js';
import { expectKeyScores, type KeyScoresArguments, scoredRules, tableRules } from './key-scores.js';

export interface QuantizedKeyScoresArguments extends KeyScoresArguments {
  /** u8 `[quantizedBlock, byte]`, `quantizedBlockBytes(headDim, keyBits)` bytes a block. */
  readonly quantizedKeys: QuantizedBlocks;
  /** Bits of a code: 8, 4, 3 or 2. */
  readonly keyBits: CodeBits;
  /** Whether the codes are of rotated keys, as `quantizeKv` was told. Default: true. */
  readonly rotated?: boolean | undefined;
}

/** In the order of `native/bindings/quantized-key-scores.binding.cc`. */
const rules = [
  ...scoredRules,
  { name: 'quantizedKeys', dtype: ['u8'], shape: ['quantizedBlock', 'keyByte'], layout: 'contiguous' },
  ...tableRules,
] as const;

const enqueue = operation('quantizedKeyScores', rules, ['scores']);

/**
 * Scores of every row and query head with every key in quantized blocks of the row's slot: `scores[t, h, j] =
 * scale * q' . k_j`, with `q'` the rotated query, or the query as it is if the blocks are plain, and `k_j` what the codes
 * stand for, for j below the kv head's `keyCounts`; other scores are not written. Sums are f32. On CUDA, rotated queries
 * that were 16-bit numbers of 64 or 128 dims are rounded to 16 bits, of their row's largest dim. A NaN of a query shows in
 * the scores of its own row and head, a NaN of a key in its own scores.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 * @throws CapabilityError for other than 8, 4, 3 or 2 bits, or heads of more than 512 dims; tables that lead outside, and
 * counts that are no multiples of 64, reject the stream's next wait with an InvalidValueError
 */
export function quantizedKeyScores(stream: Stream, args: QuantizedKeyScoresArguments): void {
  enqueue(stream, args, (natives, [query, , keys]) => {
    const name = 'quantizedKeyScores';
    const { keyBits, rotated = true } = args;
    expectShape(name, 'quantizedKeys', keys, [undefined, quantizedBlockBytes(query.shape[2], keyBits)]);
    expectKeyScores(name, args);
    expectBoolean(name, 'rotated', rotated);
    const [scale] = attentionSettings(name, { scale: args.scale });
    loadAddon().quantizedKeyScores(stream.native, ...natives, scale, keyBits, rotated);
  });
}
