import type { NativeStream } from './addon.js';
import type { Device } from './device.js';
import { elementArrayName, type DType, type ElementArray, isElementArray } from './dtype.js';
import { DisposedError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { loadAddon } from './load-addon.js';
import { fromNative } from './native-error.js';
import { type Axes, describe, elementCount, type TensorHandle } from './tensor.js';
import { nativeOf, usableTensor } from './validate.js';

/**
 * An ordered queue of operations on one device. Operations validate at once and return; they run in order
 * on native threads. After an operation fails, later ones are skipped and every wait reports that failure.
 */
export class Stream {
  readonly device: Device;
  readonly #native: NativeStream;
  #disposed = false;

  constructor(device: Device, native: NativeStream) {
    this.device = device;
    this.#native = native;
  }

  get native(): NativeStream {
    if (this.#disposed) {
      throw new DisposedError('The stream was disposed; create another with device.createStream().', {
        subject: 'stream',
      });
    }
    return this.#native;
  }

  /**
   * Resolves when everything enqueued so far is done.
   * @throws the first failure of an operation on this stream, with the operation's name
   */
  async synchronize(): Promise<void> {
    try {
      await this.native.synchronize();
    } catch (error) {
      throw fromNative(error, { subject: 'stream' });
    }
  }

  /** What is enqueued here from now on runs after all that is enqueued on `other` so far. */
  waitFor(other: Stream): void {
    if (other === this) {
      throw new InvalidValueError('waitFor: a stream cannot wait for itself; its work is in order already.', {
        subject: 'waitFor',
      });
    }
    this.native.waitFor(other.native);
  }

  /**
   * Stores `source` in a contiguous tensor, in stream order. The array may be changed at once.
   * @throws DTypeError, ShapeError when it does not fit the tensor
   */
  write<D extends DType>(tensor: TensorHandle<D>, source: ElementArray<D>): void {
    const native = nativeOf('write', 'tensor', tensor, this);
    if (!isElementArray(tensor.dtype, source)) {
      throw new DTypeError(
        `write: a ${(source as object).constructor.name} was given for ${describe(tensor)}; pass a ${elementArrayName(tensor.dtype)}.`,
        { subject: 'write', given: (source as object).constructor.name, wanted: elementArrayName(tensor.dtype) },
      );
    }
    if (source.length !== elementCount(tensor.shape) || !native.contiguous) {
      throw new ShapeError(
        `write: ${source.length} elements were given for ${describe(tensor)}; ` +
          `pass ${elementCount(tensor.shape)} elements for a contiguous tensor.`,
        { subject: 'write', given: source.length, wanted: elementCount(tensor.shape) },
      );
    }
    loadAddon().write(this.native, source, native.native);
    native.writtenBy(this);
  }

  /**
   * Copies a tensor into a contiguous one of the same dtype and element count, in stream order. One of the
   * two may be on the CPU when the stream is of another device.
   * @throws DTypeError, ShapeError when they differ
   */
  copy<D extends DType, A extends Axes>(source: TensorHandle<D, A>, destination: TensorHandle<D, A>): void {
    const native = (name: string, tensor: TensorHandle) =>
      tensor.device.kind === 'cpu' && this.device.kind !== 'cpu'
        ? usableTensor('copy', name, tensor)
        : nativeOf('copy', name, tensor, this);
    const from = native('source', source);
    const to = native('destination', destination);
    if (source.dtype !== destination.dtype) {
      throw new DTypeError(`copy: ${describe(source)} does not fit ${describe(destination)}; copy does not convert.`, {
        subject: 'copy',
        given: source.dtype,
        wanted: destination.dtype,
      });
    }
    if (elementCount(source.shape) !== elementCount(destination.shape) || !to.contiguous) {
      throw new ShapeError(
        `copy: ${describe(source)} does not fit ${describe(destination)}; ` +
          'the destination must be contiguous with as many elements.',
        { subject: 'copy', given: source.shape, wanted: destination.shape },
      );
    }
    loadAddon().copy(this.native, from.native, to.native);
    to.writtenBy(this);
  }

  /** Drops what has not begun; waits that are still pending reject. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#native.close();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
