import type { NativeTensor } from './native-handles.js';
import type { DType } from './dtype.js';
import type { Stream, Tensor } from './handles.js';
import { expectStream } from './expect-stream.js';
import { fromNative } from './native-error.js';
import { type AxisRule, type TensorRule, TensorRules } from './tensor-rules.js';

type AxesOf<S extends readonly AxisRule[]> = '...' extends S[number]
  ? readonly string[]
  : { readonly [Axis in keyof S]: string };
type Absent<R extends TensorRule> = R extends { optional: true } ? undefined : never;
type Tensors<R extends readonly TensorRule[]> = {
  readonly [Index in keyof R]: Tensor<DType, AxesOf<R[Index]['shape']>> | Absent<R[Index]>;
};
type Natives<R extends readonly TensorRule[]> = { readonly [Index in keyof R]: NativeTensor | Absent<R[Index]> };

/**
 * Makes the one check that all calls of an operation pass: every tensor is alive, on the stream's device, and as its
 * rule says; what the operation writes to shares no memory with another. `enqueue` gets the tensors in the order of
 * the rules, checks the rest, and enqueues; then the outputs remember who wrote them. What throws has changed nothing.
 */
export function operation<const R extends readonly TensorRule[]>(
  name: string,
  rules: R,
  outputs: readonly R[number]['name'][],
) {
  const checks = new TensorRules(name, rules, outputs);

  /** @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError, and what `enqueue` throws */
  return (stream: Stream, args: object, enqueue: (natives: Natives<R>, tensors: Tensors<R>) => void): void => {
    expectStream(name, stream);
    const tensors = checks.tensorsOf(args, stream);
    const natives = tensors.map((tensor) => tensor?.native);
    try {
      enqueue(natives as unknown as Natives<R>, tensors as unknown as Tensors<R>);
    } catch (error) {
      throw fromNative(error, { subject: name });
    }
    checks.markWritten(tensors, stream);
  };
}
