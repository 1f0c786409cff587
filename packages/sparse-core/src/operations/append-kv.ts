import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';
import { expectObject } from '../validate.js';
import { type PagedRows, pagedRowRules } from './attention-arguments.js';
import { expectTurn, type RopeTurn } from './rope.js';

/** How queries and keys turn by their positions before the keys are kept: what `rope` takes. */
export interface RowTurn extends RopeTurn {
  /** `[token, queryHead, dim]`, the dtype of the keys. */
  readonly query: TensorHandle<FloatDType, readonly ['token', 'queryHead', 'dim']>;
}

export interface AppendKvArguments extends PagedRows {
  /** `[token, kvHead, dim]`, after RoPE unless `rope` is given. */
  readonly keys: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** The shape, dtype and strides of `keys`. */
  readonly values: TensorHandle<FloatDType, readonly ['token', 'kvHead', 'dim']>;
  /** Turns the queries and the keys first, in place, as `rope` does and with its bits. */
  readonly rope?: RowTurn | undefined;
}

const rules = [
  { name: 'keys', dtype: floats, shape: ['token', 'kvHead', 'dim'], layout: 'rows' },
  { name: 'values', dtypeOf: 'keys', shape: ['token', 'kvHead', 'dim'], layout: 'rows', stridesOf: 'keys' },
  ...pagedRowRules,
] as const;
const outputs = ['blocks.keys', 'blocks.values', 'blocks.keyCounts'] as const;
const enqueue = operation('appendKv', rules, outputs);
const enqueueTurned = operation(
  'appendKv',
  [
    ...rules,
    { name: 'rope.query', dtypeOf: 'keys', shape: ['token', 'queryHead', 'dim'], layout: 'rows' },
    { name: 'rope.positions', dtype: ['i32'], shape: ['token'], layout: 'rows' },
    { name: 'rope.inverseFrequencies', dtype: ['f32'], shape: ['pair'], layout: 'rows' },
  ],
  [...outputs, 'keys', 'rope.query'],
);

/**
 * Writes the keys and values of new tokens behind those that their slots hold, rounded to the cache's dtype
 * (to nearest even), and raises `blocks.keyCounts`. Old tokens never move. Rows that do not fit their slot's blocks, and
 * a slot that two entries with rows name, reject the stream's next wait with an InvalidValueError; nothing is written
 * then.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function appendKv(stream: Stream, args: AppendKvArguments): void {
  expectObject('appendKv', 'the arguments', args);
  const { rope } = args;
  if (rope === undefined) {
    enqueue(stream, args, (natives) => loadAddon().appendKv(stream.native, ...natives));
    return;
  }
  enqueueTurned(stream, args, (natives) => {
    expectTurn('appendKv', rope, args.keys, rope.inverseFrequencies);
    loadAddon().appendKv(stream.native, ...natives, rope.convention === 'interleaved', rope.attentionScale ?? 1);
  });
}
