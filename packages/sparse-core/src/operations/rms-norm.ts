import type { FloatDType } from '../dtype.js';
import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { floats } from '../tensor-rules.js';
import type { Axes } from '../layout.js';
import { TensorObject } from '../tensor.js';
import { expectObject, expectThat, isFinite32 } from '../validate.js';

export interface RmsNormArguments<D extends FloatDType, A extends Axes> {
  /** `[..., feature]`, two or three axes. */
  readonly input: TensorHandle<D, A>;
  /** `[feature]` */
  readonly weight: TensorHandle<FloatDType, readonly [string]>;
  /** The shape and dtype of `input`; may be the input itself. */
  readonly output: TensorHandle<D, A>;
  /** Added to the mean square. Positive. */
  readonly epsilon: number;
}

const overAxes = (...axes: readonly string[]) => {
  const shape = [...axes, 'feature'];
  return operation(
    'rmsNorm',
    [
      { name: 'input', dtype: floats, shape, layout: 'rows' },
      { name: 'weight', dtype: floats, shape: ['feature'], layout: 'rows' },
      { name: 'output', dtypeOf: 'input', shape, layout: 'rows', inPlaceOf: ['input'] },
    ],
    ['output'],
  );
};
const [ofRows, ofHeads] = [overAxes('row'), overAxes('row', 'head')];

/**
 * Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019, eq. 4):
 * `output[r, i] = input[r, i] / sqrt(mean_j input[r, j]^2 + epsilon) * weight[i]`.
 * The mean is taken in f32.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError, InvalidValueError
 */
export function rmsNorm<D extends FloatDType, A extends Axes>(stream: Stream, args: RmsNormArguments<D, A>): void {
  expectObject('rmsNorm', 'the arguments', args);
  const enqueue = TensorObject.is(args.input) && args.input.shape.length === 3 ? ofHeads : ofRows;
  enqueue(stream, args, (natives) => {
    const { epsilon } = args;
    const isPositive = isFinite32(epsilon) && Math.fround(epsilon) > 0;
    expectThat('rmsNorm', 'epsilon', epsilon, isPositive, 'a positive f32');
    loadAddon().rmsNorm(stream.native, ...natives, epsilon);
  });
}
