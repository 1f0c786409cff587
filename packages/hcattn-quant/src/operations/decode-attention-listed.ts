import { type FloatDType, ShapeError, type Stream, type TensorHandle } from '@kv/sparse-core';
import { attentionSettings, floats, loadAddon, operation } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { expectValueScales } from './host-values.js';

/** All of them are in host memory: on CUDA, tensors of `device.hostTensor()` or of a host pool. */
export interface DecodeAttentionListedArguments {
  /** Rows of answers; `dim` is contiguous. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** Blocks of 64 tokens of one kv head; the keys and the values of a token have the same place. */
  readonly keys: TensorHandle<FloatDType, readonly ['valueBlock', 'blockToken', 'dim']>;
  /** i8 with `valueScales`. */
  readonly values: TensorHandle<FloatDType | 'i8', readonly ['valueBlock', 'blockToken', 'dim']>;
  /** bf16, for i8 only: what a code of each token stands for. */
  readonly valueScales?: TensorHandle<'bf16', readonly ['valueBlock', 'blockToken']> | undefined;
  /** i32: the first `counts` of each list are rows of `keys` and of `values`, counted through their blocks. */
  readonly valueRows: TensorHandle<'i32', readonly ['token', 'kvHead', 'chosen']>;
  /** i32: 0 to `chosen`. */
  readonly counts: TensorHandle<'i32', readonly ['token', 'kvHead']>;
  /** f32, contiguous: zeros for an empty list. */
  readonly output: TensorHandle<'f32', readonly ['token', 'queryHead', 'dim']>;
  /**
   * f32: as `selectByMass` left it. A NaN stays, and makes the output of its row and head NaN; anything else becomes the
   * natural logarithm of the softmax's denominator over the listed rows, for `mergeAttention`.
   */
  readonly logSumExp: TensorHandle<'f32', readonly ['token', 'queryHead']>;
  /** Multiplies the scores; usually 1 / sqrt(dim). */
  readonly scale: number;
}

/** In the order of `native/bindings/decode-attention-listed.binding.cc`. */
const rules = [
  { name: 'query', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
  { name: 'keys', dtype: floats, shape: ['valueBlock', blockTokens, 'dim'], layout: 'contiguous' },
  { name: 'values', dtype: [...floats, 'i8'], shape: ['valueBlock', blockTokens, 'dim'], layout: 'contiguous' },
  { name: 'valueScales', dtype: ['bf16'], shape: ['valueBlock', blockTokens], layout: 'contiguous', optional: true },
  { name: 'valueRows', dtype: ['i32'], shape: ['token', 'kvHead', 'chosen'], layout: 'contiguous' },
  { name: 'counts', dtype: ['i32'], shape: ['token', 'kvHead'], layout: 'contiguous' },
  { name: 'output', dtype: ['f32'], shape: ['token', 'queryHead', 'dim'], layout: 'contiguous' },
  { name: 'logSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous' },
] as const;

const enqueue = operation('decodeAttentionListed', rules, ['output', 'logSumExp']);

/**
 * Attends on the host to the keys and values that lists name: with the rows `r` of a kv head's list,
 * `s_i = scale q . k[r_i]`, `output = sum_i e^(s_i - logSumExp) v[r_i]`, for every query head of the kv head, zeros for an
 * empty list, whose `logSumExp` is minus infinity. It takes its turn in the stream, recorded or not. Sums are f32, of 256
 * rows at a time, and the result does not depend on the number of threads. NaN shows in the rows and heads that read it.
 * @throws ShapeError, DTypeError, DisposedError
 * @throws DeviceError for a tensor in the memory of a GPU
 * @throws InvalidValueError for a scale that is not finite in f32, or an output that shares memory with another tensor; lists that
 * lead outside reject the stream's next wait with one
 */
export function decodeAttentionListed(stream: Stream, args: DecodeAttentionListedArguments): void {
  enqueue(stream, args, (natives, [query, , values, valueScales, valueRows]) => {
    const name = 'decodeAttentionListed';
    const [queryHeads, kvHeads] = [query.shape[1], valueRows.shape[1]];
    if (kvHeads === 0 || queryHeads % kvHeads !== 0) {
      throw new ShapeError(
        `${name}: query has ${queryHeads} query heads, and there are lists of ${kvHeads} kv heads; ` +
          'the query heads must be a multiple of the kv heads.',
        { subject: 'query', given: queryHeads, wanted: kvHeads },
      );
    }
    expectValueScales(name, values, valueScales);
    const [scale] = attentionSettings(name, { scale: args.scale });
    loadAddon().decodeAttentionListed(stream.native, ...natives, scale);
  });
}
