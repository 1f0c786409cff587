import type { FloatDType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectSameStrides, expectShape, nativeOf } from '../validate.js';
import { nativePagedRows, type PagedRows } from './attention-arguments.js';

export interface AppendKvArguments extends PagedRows {
  /** `[token, kvHead, dim]`, after RoPE. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** The shape, dtype and strides of `keys`. */
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
}

/**
 * Writes the keys and values of new tokens behind those that their slots hold, rounded to the cache's dtype
 * (to nearest even), and raises `blocks.keyCounts`. Old tokens never move. No slot may appear twice in
 * `slots`. Rows that do not fit their slot's blocks reject the stream's next wait with an InvalidValueError;
 * nothing is written then.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function appendKv(stream: Stream, args: AppendKvArguments): void {
  const { keys, values, blocks } = args;
  const nativeKeys = nativeOf('appendKv', 'keys', keys, stream);
  const nativeValues = nativeOf('appendKv', 'values', values, stream);
  const paged = nativePagedRows('appendKv', args, stream);
  expectDType('appendKv', 'keys', keys, ['f32', 'f16', 'bf16']);
  expectDType('appendKv', 'values', values, [keys.dtype]);
  expectShape('appendKv', 'keys', keys, [undefined, blocks.keyCounts.shape[1], blocks.keys.shape[2]]);
  expectShape('appendKv', 'values', values, keys.shape);
  expectContiguousRows('appendKv', 'keys', keys);
  expectSameStrides('appendKv', 'values', values, keys);
  loadAddon().appendKv(stream.native, nativeKeys.native, nativeValues.native, ...paged);
  for (const written of [blocks.keys, blocks.values, blocks.keyCounts]) {
    nativeOf('appendKv', 'blocks', written, stream).writtenBy(stream);
  }
}
