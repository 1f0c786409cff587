import type { Stream, TensorHandle } from '../handles.js';
import { loadAddon } from '../load-addon.js';
import { operation } from '../operation.js';
import { expectIndices, listFor } from '../validate.js';

export interface CrossEntropyArguments {
  /** `[row, vocabulary]` */
  readonly logits: TensorHandle<'f32', readonly ['row', 'vocabulary']>;
  /** The token that came, one for each row. */
  readonly targets: ArrayLike<number>;
  /** `[row]`, in nats. */
  readonly output: TensorHandle<'f32', readonly ['row']>;
}

const enqueue = operation(
  'crossEntropy',
  [
    { name: 'logits', dtype: ['f32'], shape: ['row', 'vocabulary'], layout: 'rows' },
    { name: 'output', dtype: ['f32'], shape: ['row'], layout: 'rows' },
  ],
  ['output'],
);

/**
 * How unlikely the token that came was: `output[r] = ln Σ_v exp(logits[r, v]) − logits[r, targets[r]]`.
 * The exponential of its mean is the perplexity.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for targets outside the vocabulary
 */
export function crossEntropy(stream: Stream, args: CrossEntropyArguments): void {
  enqueue(stream, args, ([logits, output], [{ shape: [rows, vocabulary] }]) => {
    const ids = listFor('crossEntropy', 'targets', args.targets, 'row', rows);
    expectIndices('crossEntropy', 'targets', ids, vocabulary);
    using came = stream.device.tensor('i32', ['row'], [rows], Int32Array.from(ids));
    loadAddon().crossEntropy(stream.native, logits, came.native, output);
  });
}
