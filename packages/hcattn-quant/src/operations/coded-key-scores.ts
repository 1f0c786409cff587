import { type FloatDType, ShapeError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { attentionSettings, batchRules, expectHeads, floats, loadAddon, operation } from '@kv/sparse-core/native';
import type { CodedKeys } from '../coded-keys.js';
import { blockTokens } from '../quantized-blocks.js';
import { codedKeyRules, expectCodedKeys } from './block-arguments.js';

export interface CodedKeyScoresArguments extends CodedKeys {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** f32 `[token, queryHead, key]`, with room for 64 keys of each block of the table's rows. */
  readonly scores: TensorHandle<'f32', readonly ['token', 'queryHead', 'key']>;
  /** i32: the numbers of each kv head's coded blocks. */
  readonly blockTable: TensorHandle<'i32', readonly ['slot', 'kvHead', 'block']>;
  /** i32: how many tokens each kv head of each slot has in codes: a multiple of 64. */
  readonly keyCounts: TensorHandle<'i32', readonly ['slot', 'kvHead']>;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
  /** Scores are multiplied by this; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
}

/** In the order of `native/bindings/coded-key-scores.binding.cc`. */
const rules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'scores', dtype: ['f32'], shape: ['token', 'queryHead', 'key'], layout: 'rows' },
  ...codedKeyRules,
  { name: 'blockTable', dtype: ['i32'], shape: ['slot', 'kvHead', 'tableBlock'], layout: 'contiguous' },
  { name: 'keyCounts', dtype: ['i32'], shape: ['slot', 'kvHead'], layout: 'contiguous' },
  ...batchRules,
] as const;

const enqueue = operation('codedKeyScores', rules, ['scores']);

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
  enqueue(stream, args, ([query, scores, codes, centroids, channelScale, ...batch], [rows, { shape }, , , , table]) => {
    const name = 'codedKeyScores';
    expectCodedKeys(name, rows.shape[2], args);
    expectHeads(name, rows, table.shape[1]);
    const keys = table.shape[2] * blockTokens;
    if (shape[2] < keys) {
      throw new ShapeError(`${name}: scores have ${shape[2]} keys; the table's rows have ${keys}: make room for all of them.`, {
        subject: 'scores',
        given: shape[2],
        wanted: keys,
      });
    }
    const [scale] = attentionSettings(name, { scale: args.scale });
    loadAddon().codedKeyScores(stream.native, query, scores, codes, centroids, channelScale, args.codeBits, ...batch, scale);
  });
}
