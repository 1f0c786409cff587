import type { NativeRecording } from './native-handles.js';
import { DeviceError, DisposedError } from './errors.js';
import type { Recording, Stream } from './handles.js';
import { expectOwnKey, ownKey } from './own-key.js';

export class RecordingObject implements Recording {
  readonly stream: Stream;
  readonly #native: NativeRecording;
  #disposed = false;

  /** Whether this package made it: neither a look-alike nor a proxy. */
  static is(value: unknown): value is RecordingObject {
    return typeof value === 'object' && value !== null && #disposed in value;
  }

  constructor(key: typeof ownKey, stream: Stream, native: NativeRecording) {
    expectOwnKey(key, 'Recording', 'stream.record()');
    this.stream = stream;
    this.#native = native;
  }

  /**
   * For `stream.replay`.
   * @throws DisposedError, DeviceError when it is another stream's
   */
  nativeOn(stream: Stream): NativeRecording {
    if (this.#disposed) {
      throw new DisposedError('The recording was disposed; record its operations again.', { subject: 'recording' });
    }
    if (stream !== this.stream) {
      throw new DeviceError('replay: the recording is of another stream; record its operations on this one.', {
        subject: 'recording',
      });
    }
    return this.#native;
  }

  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#native.release();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
