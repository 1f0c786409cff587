import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';

/** What attention gave of rows over some keys. */
export interface AttentionPart {
  /** `[token, queryHead, dim]` */
  readonly output: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** `[token, queryHead]`, contiguous: the natural logarithm of each softmax's denominator. */
  readonly logSumExp: TensorHandle<'f32', readonly ['token', 'queryHead']>;
}

/** The part over some keys, which becomes that over all. */
export interface MergeAttentionArguments extends AttentionPart {
  /** The part over the other keys, of the same shape and any float dtype. */
  readonly other: AttentionPart;
}

const enqueue = operation(
  'mergeAttention',
  [
    { name: 'output', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
    { name: 'logSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous' },
    { name: 'other.output', dtype: floats, shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
    { name: 'other.logSumExp', dtype: ['f32'], shape: ['token', 'queryHead'], layout: 'contiguous' },
  ],
  ['output', 'logSumExp'],
);

/**
 * Attention over all keys, from attention over some of them and over the others (Flash-Decoding, Dao et al. 2023), in
 * place: `l = log(exp(l1) + exp(l2))`, `output = exp(l1 - l) output1 + exp(l2 - l) output2`, for each row and query head,
 * in f32. A part that has seen no key, with a `logSumExp` of minus infinity, adds nothing: the other one's numbers are the
 * result. NaN stays in its row and head.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError; InvalidValueError when an output lies over another tensor
 */
export function mergeAttention(stream: Stream, args: MergeAttentionArguments): void {
  enqueue(stream, args, (natives) => loadAddon().mergeAttention(stream.native, ...natives));
}
