import type { NativeRecording, NativeStream } from './native-handles.js';
import { type DType, type ElementArray, expectElements } from './dtype.js';
import { DeviceError, DisposedError, DTypeError, InvalidValueError, ShapeError } from './errors.js';
import { type Axes, elementCount } from './layout.js';
import { loadAddon } from './load-addon.js';
import { expectStream } from './expect-stream.js';
import type { Device, Recording, Stream, StreamOptions, TensorHandle, WaitOptions } from './handles.js';
import { fromNative } from './native-error.js';
import { RecordingObject } from './recording.js';
import { ownStream } from './own-objects.js';
import { overlap } from './overlap.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { show } from './show.js';
import { describe, nativeOf, reachableFrom, type TensorObject } from './tensor.js';
import { expectBoolean, expectContiguous, expectOptions, expectWritable, listOf } from './validate.js';

const mostSources = 2 ** 20; // of one copy

export class StreamObject implements Stream {
  readonly device: Device;
  readonly #native: NativeStream;
  readonly #onFailure: ((failure: Error) => void) | undefined;
  /** How many waits were asked for, and the newest of them that has come true. */
  #asked = 0;
  #reached = 0;
  #failure: Error | undefined;
  /** The `record` that collects what is enqueued here, while it is open: this stream's own, or of one it waits for. */
  #session: { readonly stream: StreamObject; open: boolean } | undefined;
  #disposed = false;

  constructor(key: typeof ownKey, device: Device, native: NativeStream, { onFailure }: StreamOptions = {}) {
    expectOwnKey(key, 'Stream', 'device.createStream()');
    this.device = device;
    this.#native = native;
    this.#onFailure = onFailure;
    ownStream(this);
  }

  get native(): NativeStream {
    this.assertUsable();
    return this.#native;
  }

  assertUsable(): void {
    if (!this.#disposed) return;
    const cause = this.#failure;
    const why = cause === undefined ? 'was disposed' : `was ended by an error (${cause.message})`;
    throw new DisposedError(`The stream ${why}; create another with device.createStream().`, { subject: 'stream', cause });
  }

  get recording(): boolean {
    return this.#session?.open === true;
  }

  get runsOn(): Stream {
    return this.#session?.open === true ? this.#session.stream : this;
  }

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
        // What it waited for may be what a recording refuses: nobody would hear of that, and Node ends the process.
        result.catch(() => undefined);
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
    return new RecordingObject(ownKey, this, native);
  }

  replay(recording: Recording): void {
    if (!RecordingObject.is(recording)) {
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

  async synchronize(): Promise<void> {
    try {
      await this.waited(this.native.synchronize());
    } catch (error) {
      throw fromNative(error, { subject: 'stream' });
    }
  }

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

  progress(): () => boolean {
    const asked = this.#asked;
    return () => this.#reached > asked;
  }

  waitFor(other: Stream, options: WaitOptions = {}): void {
    expectStream('waitFor', other);
    expectOptions('waitFor', options, { takesFailure: true });
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
    if (other.recording && #session in other) this.#session = other.#session;
  }

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

  copy<D extends DType, A extends Axes>(
    source: TensorHandle<D, A> | readonly TensorHandle<D, A>[],
    destination: TensorHandle<D, A>,
  ): void {
    const several = Array.isArray(source) ? listOf<TensorHandle>('copy', 'source', source, mostSources) : undefined;
    const from = (several ?? [source]).map((each) => reachableFrom('copy', 'source', each, this));
    const to = reachableFrom('copy', 'destination', destination, this);
    expectWritable('copy', 'destination', to);
    for (const each of from) {
      expectCopyable(each, to);
      if (several) expectContiguous('copy', 'source', each);
    }
    const elements = from.reduce((sum, { shape }) => sum + elementCount(shape), 0);
    if (elements !== elementCount(to.shape) || !to.contiguous) {
      throw new ShapeError(
        `copy: ${from.map(describe).join(', ')} does not fit ${describe(to)}; ` +
          'the destination must be contiguous with as many elements.',
        { subject: 'copy', given: from.flatMap(({ shape }) => shape), wanted: to.shape },
      );
    }
    throwsPublicly('copy', () => {
      loadAddon().copy(this.native, to.native, ...from.map(({ native }) => native));
    });
    to.writtenBy(this);
  }

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

/** @throws DTypeError, InvalidValueError when the elements of one tensor cannot be those of the other */
function expectCopyable(from: TensorObject, to: TensorObject): void {
  if (from.dtype !== to.dtype) {
    throw new DTypeError(`copy: ${describe(from)} does not fit ${describe(to)}; copy does not convert.`, {
      subject: 'copy',
      given: from.dtype,
      wanted: to.dtype,
    });
  }
  if (overlap(from, to)) {
    throw new InvalidValueError('copy: the destination shares memory with the source; give it its own.', {
      subject: 'destination',
    });
  }
}

function throwsPublicly(subject: string, call: () => void): void {
  try {
    call();
  } catch (error) {
    throw fromNative(error, { subject });
  }
}
