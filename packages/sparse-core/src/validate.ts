import type { DType } from './dtype.js';
import { DeviceError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { show } from './show.js';
import { Stream } from './stream.js';
import { rowMajorStrides } from './layout.js';
import { describe, Tensor, type TensorHandle } from './tensor.js';

/** @throws DeviceError, DisposedError unless it is a stream, and open */
export function expectStream(operation: string, stream: unknown): asserts stream is Stream {
  if (!Stream.is(stream)) {
    throw new DeviceError(`${operation}: ${show(stream)} is no stream; make one with device.createStream().`, {
      subject: 'stream',
    });
  }
  stream.assertUsable();
}

/**
 * A tensor argument as this package made it, alive.
 * @throws DeviceError, DisposedError
 */
export function usableTensor(operation: string, name: string, tensor: unknown): Tensor {
  if (!Tensor.is(tensor)) {
    throw new DeviceError(
      `${operation}: ${name} is not a tensor of this package; wrap foreign memory with device.wrap().`,
      { subject: name },
    );
  }
  tensor.assertUsable();
  return tensor;
}

/**
 * The one boundary check of a tensor argument: made by this package, alive, on the stream's device.
 * @throws DeviceError, DisposedError
 */
export function nativeOf(operation: string, name: string, tensor: unknown, stream: Stream): Tensor {
  expectStream(operation, stream);
  const native = usableTensor(operation, name, tensor);
  if (native.device !== stream.device) {
    throw new DeviceError(
      `${operation}: ${name} lives on one device, ${native.device.name}, and the stream is of another, ` +
        `${stream.device.name}. Make it on the stream's device, or copy it there first.`,
      { subject: name, given: native.device.name, wanted: stream.device.name },
    );
  }
  return native;
}

/**
 * A tensor to copy from or to: it may be the CPU's, whatever the stream's device.
 * @throws DeviceError, DisposedError
 */
export function reachableFrom(operation: string, name: string, tensor: unknown, stream: Stream): Tensor {
  expectStream(operation, stream);
  const usable = usableTensor(operation, name, tensor);
  return usable.device.kind === 'cpu' && stream.device.kind !== 'cpu'
    ? usable
    : nativeOf(operation, name, usable, stream);
}

/** @throws InvalidValueError when nothing may be written to it */
export function expectWritable(operation: string, name: string, tensor: TensorHandle): void {
  if (!tensor.readOnly) return;
  throw new InvalidValueError(
    `${operation}: ${name} is ${describe(tensor)} over a file that was mapped, which is read-only; ` +
      'give a tensor of device.tensor() to write to.',
    { subject: name },
  );
}

/** @throws DTypeError unless the tensor's dtype is among `wanted` */
export function expectDType(operation: string, name: string, tensor: TensorHandle, wanted: readonly DType[]): void {
  if (!wanted.includes(tensor.dtype)) {
    throw new DTypeError(`${operation}: ${name} is ${describe(tensor)}; its dtype must be ${wanted.join(', ')}.`, {
      subject: name,
      given: tensor.dtype,
      wanted,
    });
  }
}

/** @throws ShapeError unless the tensor has exactly this shape; `undefined` accepts any extent */
export function expectShape(
  operation: string,
  name: string,
  tensor: TensorHandle,
  wanted: readonly (number | undefined)[],
): void {
  const fits =
    tensor.shape.length === wanted.length &&
    wanted.every((extent, axis) => extent === undefined || tensor.shape[axis] === extent);
  if (!fits) {
    const extents = wanted.map((extent) => (extent === undefined ? 'any' : String(extent)));
    throw new ShapeError(`${operation}: ${name} is ${describe(tensor)}; its shape must be [${extents.join(', ')}].`, {
      subject: name,
      given: tensor.shape,
      wanted,
    });
  }
}

/** @throws ShapeError unless the elements of the last axis lie next to each other */
export function expectContiguousRows(operation: string, name: string, tensor: TensorHandle): void {
  const last = tensor.shape.length - 1;
  if ((tensor.shape[last] ?? 0) > 1 && tensor.strides[last] !== 1) {
    throw new ShapeError(
      `${operation}: ${name} is ${describe(tensor)} with strides [${tensor.strides.join(', ')}]; ` +
        'its last axis must be contiguous. Copy it first.',
      { subject: name, given: tensor.strides, wanted: 1 },
    );
  }
}

/** @throws ShapeError unless the elements lie in row-major order without gaps */
export function expectContiguous(operation: string, name: string, tensor: TensorHandle): void {
  const wanted = rowMajorStrides(tensor.shape);
  if (tensor.shape.some((extent, axis) => extent > 1 && tensor.strides[axis] !== wanted[axis])) {
    throw new ShapeError(
      `${operation}: ${name} is ${describe(tensor)} with strides [${tensor.strides.join(', ')}]; ` +
        'it must be contiguous. Copy it first.',
      { subject: name, given: tensor.strides, wanted },
    );
  }
}

/** @throws ShapeError unless both tensors are laid out alike */
export function expectSameStrides(operation: string, name: string, tensor: TensorHandle, other: TensorHandle): void {
  if (tensor.strides.some((stride, axis) => stride !== other.strides[axis])) {
    throw new ShapeError(
      `${operation}: ${name} has the strides [${tensor.strides.join(', ')}]; they must be ` +
        `[${other.strides.join(', ')}], like those of its partner.`,
      { subject: name, given: tensor.strides, wanted: other.strides },
    );
  }
}
