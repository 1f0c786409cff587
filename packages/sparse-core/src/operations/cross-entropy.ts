import { InvalidValueError, ShapeError } from '../errors.js';
import { loadAddon } from '../load-addon.js';
import type { Stream } from '../stream.js';
import { describe, type TensorHandle } from '../tensor.js';
import { expectContiguousRows, expectDType, expectShape, nativeOf } from '../validate.js';

export interface CrossEntropyArguments {
  /** `[row, vocabulary]` */
  readonly logits: TensorHandle<'f32', readonly ['row', 'vocabulary']>;
  /** The token that came, one for each row. */
  readonly targets: ArrayLike<number>;
  /** `[row]`, in nats. */
  readonly output: TensorHandle<'f32', readonly ['row']>;
}

/**
 * How unlikely the token that came was: `output[r] = ln Σ_v exp(logits[r, v]) − logits[r, targets[r]]`.
 * The exponential of its mean is the perplexity.
 * @throws ShapeError, DTypeError, DeviceError, DisposedError
 * @throws InvalidValueError for targets outside the vocabulary
 */
export function crossEntropy(stream: Stream, { logits, targets, output }: CrossEntropyArguments): void {
  const native = {
    logits: nativeOf('crossEntropy', 'logits', logits, stream),
    output: nativeOf('crossEntropy', 'output', output, stream),
  };
  expectDType('crossEntropy', 'logits', logits, ['f32']);
  expectDType('crossEntropy', 'output', output, ['f32']);
  expectShape('crossEntropy', 'logits', logits, [undefined, undefined]);
  const [rows, vocabulary] = logits.shape;
  expectShape('crossEntropy', 'output', output, [rows]);
  for (const [name, tensor] of Object.entries({ logits, output })) expectContiguousRows('crossEntropy', name, tensor);
  if (targets.length !== rows) {
    throw new ShapeError(`crossEntropy: ${targets.length} targets were given for ${describe(logits)}.`, {
      subject: 'targets',
      given: targets.length,
      wanted: rows,
    });
  }
  const ids = Array.from(targets);
  const outside = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= vocabulary);
  if (outside !== undefined) {
    throw new InvalidValueError(`crossEntropy: target ${outside} is none of the ${vocabulary} of the vocabulary.`, {
      subject: 'targets',
      given: outside,
      wanted: vocabulary,
    });
  }
  using came = stream.device.tensor('i32', ['row'], [rows], Int32Array.from(ids));
  loadAddon().crossEntropy(stream.native, native.logits.native, came.native, native.output.native);
  native.output.writtenBy(stream);
}
