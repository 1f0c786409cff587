import type { NativeRecording, NativeStream } from './addon.js';
import type { Device } from './device.js';
import { type DType, type ElementArray, expectElements } from './dtype.js';
import { DeviceError, DisposedError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { type Axes, elementCount } from './layout.js';
import { loadAddon } from './load-addon.js';
import { fromNative } from './native-error.js';
import { Recording } from './recording.js';
import { overlap } from './overlap.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { show } from './show.js';
import { describe, type TensorHandle } from './tensor.js';
import { expectBoolean, expectContiguous, expectObject, expectStream, expectWritable, nativeOf, reachableFrom } from './validate.js';

export interface StreamOptions {
  /**
   * Called once, when a wait first finds that an operation has failed, and before that wait rejects. It must not throw.
   */
  readonly onFailure?: ((failure: Error) => void) | undefined;
}

export interface WaitOptions {
  /** Whether what failed on the other stream fails this one too. Default: true. */
  readonly takesFailure?: boolean | undefined;
}

/**
 * An ordered queue of operations on one device. Operations validate at once and return; they run in order
 * on native threads. After an operation fails, later ones are skipped and every wait reports that failure.
 */
export class Stream {
  readonly device: Device;
  readonly #native: NativeStream;
  readonly #onFailure: ((failure: Error) => void) | undefined;
  /** How many waits were asked for, and the newest of them that has come true. */
  #asked = 0;
  #reached = 0;
  #failure: Error | undefined;
  /** The `record` that collects what is enqueued here, while it is open: this stream's own, or of one it waits for. */
  #session: { readonly stream: Stream; open: boolean } | undefined;
  #disposed = false;

  constructor(key: typeof ownKey, device: Device, native: NativeStream, { onFailure }: StreamOptions = {}) {
    expectOwnKey(key, 'Stream', 'device.createStream()');
    this.device = device;
    this.#native = native;
    this.#onFailure = onFailure;
  }

  /** Whether this package made it: neither a look-alike nor a proxy. */
  static is(value: unknown): value is Stream {
    return typeof value === 'object' && value !== null && #disposed in value;
  }

  get native(): NativeStream {
    this.assertUsable();
    return this.#native;
  }

  /** @throws DisposedError */
  assertUsable(): void {
    if (!this.#disposed) return;
    const cause = this.#failure;
    const why = cause === undefined ? 'was disposed' : `was ended by an error (${cause.message})`;
    throw new DisposedError(`The stream ${why}; create another with device.createStream().`, { subject: 'stream', cause });
  }

  /** Whether `record` is collecting what is enqueued. */
  get recording(): boolean {
    return this.#session?.open === true;
  }

  /** The stream in whose order this one's work runs: itself, or the one that records it. */
  get runsOn(): Stream {
    return this.#session?.open === true ? this.#session.stream : this;
  }

  /**
   * Collects the operations that `enqueue` enqueues on this stream, instead of running them; `replay` runs them all,
   * on the same tensors, as often as it is called. On CUDA a replay is one launch of a graph. Tensors that the
   * operations use stay in memory until the recording is disposed.
   *
   * Another stream that waits for this one meanwhile is recorded too, beside it, from there on; on CUDA the two parts of
   * the graph run at the same time. This stream must wait for its last operation before the recording ends. A replay
   * runs all of it in the order of this stream: what else the other stream does is in no order with it.
   *
   * Only work of the device can be recorded: `write`, `read`, `synchronize`, `replay`, `waitFor` a stream that is not
   * recorded, and copies from or to host memory throw.
   * @throws InvalidValueError for a recording inside another, an `enqueue` that is asynchronous or no function, or a
   * stream that was recorded beside this one and is not waited for
   * @throws what `enqueue` throws; nothing is recorded then
   */
  record(enqueue: () => unknown): Recording {
    if (this.recording) {
      throw new InvalidValueError('record: the stream is recording already; recordings do not nest.', {
        subject: 'record',
      });
    }
    if (typeof enqueue !== 'function') {
      throw new InvalidValueError(`record: ${show(enqueue)} was given; pass a function that enqueues operations.`, {
        subject: 'record',
        given: enqueue,
      });
    }
    this.native.beginRecording();
    this.#session = { stream: this, open: true };
    try {
      const result = enqueue();
      if (result instanceof Promise) {
        throw new InvalidValueError('record: what an asynchronous function enqueues later would be lost; pass a synchronous one.', {
          subject: 'record',
        });
      }
    } catch (error) {
      this.#endRecording().release();
      throw error;
    }
    const native = this.#endRecording();
    if (!native.joined()) {
      native.release();
      throw new InvalidValueError(
        'record: another stream was recorded beside this one and goes on after the end; ' +
          'call waitFor with it on this stream, after its last operation.',
        { subject: 'record' },
      );
    }
    return new Recording(ownKey, this, native);
  }

  /**
   * Enqueues everything that was recorded.
   * @throws DisposedError, DeviceError when the recording is another stream's, CapabilityError while `record`
   * collects, InvalidValueError when it is no recording
   */
  replay(recording: Recording): void {
    if (!Recording.is(recording)) {
      throw new InvalidValueError(`replay: ${show(recording)} is no recording; make one with stream.record().`, {
        subject: 'recording',
        given: recording,
      });
    }
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
      await this.waited(this.native.synchronize());
    } catch (error) {
      throw fromNative(error, { subject: 'stream' });
    }
  }

  /** What a wait that the addon has just begun comes to; all of them pass here. */
  async waited<Result>(wait: Promise<Result>): Promise<Result> {
    const asked = (this.#asked += 1);
    try {
      const result = await wait;
      this.#reached = Math.max(this.#reached, asked);
      return result;
    } catch (error) {
      if (this.#failure === undefined && !this.#disposed) {
        this.#failure = fromNative(error, { subject: 'stream' }) as Error;
        this.#onFailure?.(this.#failure);
      }
      throw error;
    }
  }

  /**
   * Tells, whenever it is asked, whether a wait has shown that all that was enqueued before this call is done. It waits for
   * nothing itself.
   */
  progress(): () => boolean {
    const asked = this.#asked;
    return () => this.#reached > asked;
  }

  /**
   * What is enqueued here from now on runs after all that is enqueued on `other` so far. On CUDA it is an event: nobody
   * waits but the device. A failure before it, on `other`, fails this stream too, unless this one takes the place of a
   * stream that failed (`takesFailure: false`).
   *
   * While `other` records, this stream becomes part of its recording (`record` says how).
   * @throws DisposedError, DeviceError when `other` is no stream or of another device, CapabilityError when this stream
   * records and `other` is not part of that, InvalidValueError when it is this stream
   */
  waitFor(other: Stream, options: WaitOptions = {}): void {
    expectStream('waitFor', other);
    expectObject('waitFor', 'options', options);
    const { takesFailure = true } = options;
    expectBoolean('waitFor', 'takesFailure', takesFailure);
    if (other === this) {
      throw new InvalidValueError('waitFor: a stream cannot wait for itself; its work is in order already.', {
        subject: 'waitFor',
      });
    }
    if (other.device !== this.device) {
      throw new DeviceError(
        `waitFor: the other stream is of ${other.device.name}, this one of ${this.device.name}, and devices have no ` +
          'order between them. Await synchronize() of the other stream first.',
        { subject: 'waitFor', given: other.device.name, wanted: this.device.name },
      );
    }
    throwsPublicly('waitFor', () => {
      this.native.waitFor(other.native, takesFailure);
    });
    if (other.recording) this.#session = other.#session;
  }

  /**
   * Stores `source` in a contiguous tensor, in stream order. The array may be changed at once.
   * @throws DTypeError, ShapeError when it does not fit the tensor, InvalidValueError when the tensor is read-only
   */
  write<D extends DType>(tensor: TensorHandle<D>, source: ElementArray<D>): void {
    const native = nativeOf('write', 'tensor', tensor, this);
    expectWritable('write', 'tensor', native);
    expectElements('write', tensor.dtype, elementCount(tensor.shape), source);
    expectContiguous('write', 'tensor', native);
    throwsPublicly('write', () => {
      loadAddon().write(this.native, source, native.native);
    });
    native.writtenBy(this);
  }

  /**
   * Copies a tensor into a contiguous one of the same dtype and element count, in stream order. One of the
   * two may be on the CPU when the stream is of another device.
   * @throws DTypeError, ShapeError when they differ, InvalidValueError when they share memory or the destination is
   * read-only
   */
  copy<D extends DType, A extends Axes>(source: TensorHandle<D, A>, destination: TensorHandle<D, A>): void {
    const from = reachableFrom('copy', 'source', source, this);
    const to = reachableFrom('copy', 'destination', destination, this);
    expectWritable('copy', 'destination', to);
    if (from.dtype !== to.dtype) {
      throw new DTypeError(`copy: ${describe(from)} does not fit ${describe(to)}; copy does not convert.`, {
        subject: 'copy',
        given: from.dtype,
        wanted: to.dtype,
      });
    }
    if (elementCount(from.shape) !== elementCount(to.shape) || !to.contiguous) {
      throw new ShapeError(
        `copy: ${describe(from)} does not fit ${describe(to)}; ` +
          'the destination must be contiguous with as many elements.',
        { subject: 'copy', given: from.shape, wanted: to.shape },
      );
    }
    if (overlap(from, to)) {
      throw new InvalidValueError('copy: the destination shares memory with the source; give it its own.', {
        subject: 'destination',
      });
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

  #endRecording(): NativeRecording {
    if (this.#session !== undefined) this.#session.open = false;
    return this.native.endRecording();
  }
}

function throwsPublicly(subject: string, call: () => void): void {
  try {
    call();
  } catch (error) {
    throw fromNative(error, { subject });
  }
}
