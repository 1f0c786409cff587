import type { NativeStream } from './addon.js';
import type { Device } from './device.js';
import { elementArrayName, type DType, type ElementArray, isElementArray } from './dtype.js';
import { DisposedError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { loadAddon } from './load-addon.js';
import { fromNative } from './native-error.js';
import { Recording } from './recording.js';
import { type Axes, describe, elementCount, type TensorHandle } from './tensor.js';
import { nativeOf, usableTensor } from './validate.js';

/**
 * An ordered queue of operations on one device. Operations validate at once and return; they run in order
 * on native threads. After an operation fails, later ones are skipped and every wait reports that failure.
 */
export class Stream {
  readonly device: Device;
  readonly #native: NativeStream;
  #recording = false;
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

  /** Whether `record` is collecting what is enqueued. */
  get recording(): boolean {
    return this.#recording;
  }

  /**
   * Collects the operations that `enqueue` enqueues on this stream, instead of running them; `replay` runs them all,
   * on the same tensors, as often as it is called. On CUDA a replay is one launch of a graph. Tensors that the
   * operations use stay in memory until the recording is disposed.
   *
   * Only work of the device can be recorded: `write`, `read`, `synchronize`, `waitFor`, `replay` and copies from or
   * to host memory throw.
   * @throws InvalidValueError for a recording inside another, or an asynchronous `enqueue`
   * @throws what `enqueue` throws; nothing is recorded then
   */
  record(enqueue: () => unknown): Recording {
    if (this.#recording) {
      throw new InvalidValueError('record: the stream is recording already; recordings do not nest.', {
        subject: 'record',
      });
    }
    this.native.beginRecording();
    this.#recording = true;
    try {
      const result = enqueue();
      if (result instanceof Promise) {
        throw new InvalidValueError('record: what an asynchronous function enqueues later would be lost; pass a synchronous one.', {
          subject: 'record',
        });
      }
    } catch (error) {
      this.#endRecording().dispose();
      throw error;
    }
    return this.#endRecording();
  }

  /**
   * Enqueues everything that was recorded.
   * @throws DisposedError, DeviceError when the recording is another stream's, CapabilityError while `record` collects
   */
  replay(recording: Recording): void {
    const native = recording.nativeOn(this);
    throwsPublicly('replay', () => {
      this.native.replay(native);
    });
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
    throwsPublicly('waitFor', () => {
      this.native.waitFor(other.native);
    });
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
    throwsPublicly('write', () => {
      loadAddon().write(this.native, source, native.native);
    });
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
    throwsPublicly('copy', () => {
      loadAddon().copy(this.native, from.native, to.native);
    });
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

  #endRecording(): Recording {
    this.#recording = false;
    return new Recording(this, this.native.endRecording());
  }
}

function throwsPublicly(subject: string, call: () => void): void {
  try {
    call();
  } catch (error) {
    throw fromNative(error, { subject });
  }
}
