import { OutOfMemoryError } from '../errors.js';
import type { Device, Tensor } from '../handles.js';
import { type Axes, elementCount, type Extents } from '../layout.js';

/**
 * A table of a cache, of zeros.
 * @throws OutOfMemoryError when it does not fit the device, or its zeros an array
 */
export function zeroTable<const A extends Axes>(device: Device, axes: A, shape: Extents<A>): Tensor<'i32', A> {
  return device.tensor('i32', axes, shape, zeros(axes, shape));
}

function zeros(axes: Axes, shape: readonly number[]): Int32Array {
  const count = elementCount(shape);
  try {
    return new Int32Array(count);
  } catch (cause) {
    throw new OutOfMemoryError(
      `A table of axes [${axes.join(', ')}] and shape [${shape.join(', ')}] has ${count} entries, more than there is ` +
        'room for. Give the cache fewer slots, or fewer tokens in each.',
      { subject: 'table', given: shape, cause },
    );
  }
}
