import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';

type Rows<D extends FloatDType> = TensorHandle<D, readonly ['token', 'feature']>;

export interface SwigluArguments<D extends FloatDType> {
  /** `[token, feature]` */
  readonly gate: Rows<D>;
  /** The shape and dtype of `gate`. */
  readonly up: Rows<D>;
  /** The shape and dtype of `gate`; may be `gate` or `up` itself. */
  readonly output: Rows<D>;
}

const enqueue = operation(
  'swiglu',
  [
    { name: 'gate', dtype: floats, shape: ['token', 'feature'], layout: 'rows' },
    { name: 'up', dtypeOf: 'gate', shape: ['token', 'feature'], layout: 'rows' },
    { name: 'output', dtypeOf: 'gate', shape: ['token', 'feature'], layout: 'rows', inPlaceOf: ['gate', 'up'] },
  ],
  ['output'],
);

/**
 * The gate of a SwiGLU feed-forward layer (Shazeer 2020, eq. 6), between its projections:
 * `output[t, i] = silu(gate[t, i]) * up[t, i]` with `silu(x) = x / (1 + exp(-x))`. Computed in f32.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError; InvalidValueError when the output lies over part of an input
 */
export function swiglu<D extends FloatDType>(stream: Stream, args: SwigluArguments<D>): void {
  enqueue(stream, args, (natives) => loadAddon().swiglu(stream.native, ...natives));
}
