import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';
import { type PagedRows, pagedRowRules } from './attention-arguments.js';

export interface AppendKvArguments extends PagedRows {
  /** `[token, kvHead, dim]`, after RoPE. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** The shape, dtype and strides of `keys`. */
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
}

const enqueue = operation(
  'appendKv',
  [
    { name: 'keys', dtype: floats, shape: ['token', 'kvHead', 'dim'], layout: 'rows' },
    { name: 'values', dtypeOf: 'keys', shape: ['token', 'kvHead', 'dim'], layout: 'rows', stridesOf: 'keys' },
    ...pagedRowRules,
  ],
  ['blocks.keys', 'blocks.values', 'blocks.keyCounts'],
);

/**
 * Writes the keys and values of new tokens behind those that their slots hold, rounded to the cache's dtype
 * (to nearest even), and raises `blocks.keyCounts`. Old tokens never move. Rows that do not fit their slot's blocks, and
 * a slot that two entries with rows name, reject the stream's next wait with an InvalidValueError; nothing is written
 * then.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function appendKv(stream: Stream, args: AppendKvArguments): void {
  enqueue(stream, args, (natives) => loadAddon().appendKv(stream.native, ...natives));
}
