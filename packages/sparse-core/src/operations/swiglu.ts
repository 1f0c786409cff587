import type { FloatDType } from '../dtype.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import type { TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

type Rows<D extends FloatDType> = TensorHandle<D, readonly ['token', 'feature']>;

export interface SwigluArguments<D extends FloatDType> {
  /** `[token, feature]` */
  readonly gate: Rows<D>;
  /** The shape and dtype of `gate`. */
  readonly up: Rows<D>;
  /** The shape and dtype of `gate`; may be `gate` or `up` itself. */
  readonly output: Rows<D>;
}

/**
 * The gate of a SwiGLU feed-forward layer (Shazeer 2020, eq. 6), between its projections:
 * `output[t, i] = silu(gate[t, i]) * up[t, i]` with `silu(x) = x / (1 + exp(-x))`. Computed in f32.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 */
export function swiglu<D extends FloatDType>(stream: Stream, args: SwigluArguments<D>): void {
  const { gate, up, output } = args;
  const native = {
    gate: nativeOf('swiglu', 'gate', gate, stream).native,
    up: nativeOf('swiglu', 'up', up, stream).native,
    output: nativeOf('swiglu', 'output', output, stream),
  };
  expectDType('swiglu', 'gate', gate, ['f32', 'f16', 'bf16']);
  expectDType('swiglu', 'up', up, [gate.dtype]);
  expectDType('swiglu', 'output', output, [gate.dtype]);
  expectShape('swiglu', 'gate', gate, [undefined, undefined]);
  expectShape('swiglu', 'up', up, gate.shape);
  expectShape('swiglu', 'output', output, gate.shape);
  for (const [name, tensor] of Object.entries({ gate, up, output }))
    expectContiguousRows('swiglu', name, tensor);
  loadAddon().swiglu(stream.native, native.gate, native.up, native.output.native);
  native.output.writtenBy(stream);
}
