import type { NativeAttentionArguments, NativePagedRows } from '../addon.js';
import type { FloatDType } from '../dtype.js';
import { InvalidValueError, ShapeError } from '../errors.js';
import type { PagedBlocks } from '../paged-blocks.js';
import type { Stream } from '../stream.js';
import { describe, type TensorHandle } from '../tensor.js';
import {
  expectContiguous,
  expectContiguousRows,
  expectDType,
  expectSameStrides,
  expectShape,
  nativeOf,
} from '../validate.js';

const floats = ['f32', 'f16', 'bf16'] as const;

/** Which rows belong to which sequence, and where the sequence's keys and values lie. */
export interface PagedRows {
  readonly blocks: PagedBlocks;
  /** i32 `[batch]`: the slot that entry `b` belongs to. */
  readonly slots: TensorHandle<'i32', readonly ['batch']>;
  /** i32 `[batch + 1]`, ascending: entry `b` owns rows `queryStart[b] .. queryStart[b + 1] - 1`. */
  readonly queryStart: TensorHandle<'i32', readonly ['boundary']>;
}

export interface AttentionArguments extends PagedRows {
  /** `[token, queryHead, dim]`, after RoPE; query heads are a multiple of the cache's kv heads. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** The shape of `query`, of any float dtype. */
  readonly output: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
  /** `[token, queryHead]`, contiguous: the natural logarithm of each softmax's denominator. */
  readonly logSumExp?: TensorHandle<'f32', readonly ['token', 'queryHead']> | undefined;
  /** Scores are multiplied by this before the softmax; usually `1 / sqrt(headDim)`. */
  readonly scale: number;
  /**
   * With causal, query i of an entry's n sees the keys `0 .. keyCount - n + i`; without, all of them. A query
   * that sees no key gives zeros and a `logSumExp` of minus infinity. Default: true.
   */
  readonly causal?: boolean | undefined;
}

/**
 * Checks what an operation over paged blocks is given, and returns keys, values, blockTable, keyCounts, slots
 * and queryStart in the order of `native/bindings/paged-batch.h`.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function nativePagedRows(operation: string, args: PagedRows, stream: Stream): NativePagedRows {
  const { keys, values, blockTable, keyCounts } = args.blocks;
  const { slots, queryStart } = args;
  const native = (name: string, tensor: TensorHandle) => nativeOf(operation, name, tensor, stream).native;
  const natives: NativePagedRows = [
    native('keys', keys),
    native('values', values),
    native('blockTable', blockTable),
    native('keyCounts', keyCounts),
    native('slots', slots),
    native('queryStart', queryStart),
  ];
  expectDType(operation, 'keys', keys, floats);
  expectDType(operation, 'values', values, [keys.dtype]);
  expectShape(operation, 'keys', keys, [undefined, undefined, undefined]);
  expectShape(operation, 'values', values, keys.shape);
  expectContiguousRows(operation, 'keys', keys);
  expectSameStrides(operation, 'values', values, keys);
  expectShape(operation, 'keyCounts', keyCounts, [undefined, undefined]);
  expectShape(operation, 'blockTable', blockTable, [...keyCounts.shape, undefined]);
  expectShape(operation, 'slots', slots, [undefined]);
  expectShape(operation, 'queryStart', queryStart, [slots.shape[0] + 1]);
  for (const [name, tensor] of Object.entries({ blockTable, keyCounts, slots, queryStart })) {
    expectDType(operation, name, tensor, ['i32']);
    expectContiguous(operation, name, tensor);
  }
  return natives;
}

/**
 * Checks the arguments of an attention operation and enqueues it with what native code takes.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function enqueueAttention(
  operation: string,
  stream: Stream,
  args: AttentionArguments,
  enqueue: (...natives: NativeAttentionArguments) => void,
): void {
  const { query, output, logSumExp, blocks, scale, causal = true } = args;
  const nativeQuery = nativeOf(operation, 'query', query, stream);
  const nativeOutput = nativeOf(operation, 'output', output, stream);
  const nativeLogSumExp = logSumExp && nativeOf(operation, 'logSumExp', logSumExp, stream);
  const paged = nativePagedRows(operation, args, stream);
  expectDType(operation, 'query', query, floats);
  expectDType(operation, 'output', output, floats);
  expectShape(operation, 'query', query, [undefined, undefined, blocks.keys.shape[2]]);
  expectShape(operation, 'output', output, query.shape);
  expectContiguousRows(operation, 'query', query);
  expectContiguousRows(operation, 'output', output);
  const [tokens, queryHeads] = query.shape;
  const kvHeads = blocks.keyCounts.shape[1];
  if (queryHeads % kvHeads !== 0) {
    throw new ShapeError(
      `${operation}: query is ${describe(query)} and the cache has ${kvHeads} kv heads; ` +
        'the query heads must be a multiple of them.',
      { subject: 'query', given: queryHeads, wanted: kvHeads },
    );
  }
  if (logSumExp) {
    expectDType(operation, 'logSumExp', logSumExp, ['f32']);
    expectShape(operation, 'logSumExp', logSumExp, [tokens, queryHeads]);
    expectContiguous(operation, 'logSumExp', logSumExp);
  }
  if (!Number.isFinite(scale)) {
    throw new InvalidValueError(`${operation}: scale is ${scale}; it must be a finite number.`, {
      subject: 'scale',
      given: scale,
    });
  }
  enqueue(nativeQuery.native, nativeOutput.native, nativeLogSumExp?.native, ...paged, scale, causal);
  nativeOutput.writtenBy(stream);
  nativeLogSumExp?.writtenBy(stream);
}
