import { DeviceError } from './errors.js';
import type { Stream } from './handles.js';
import { isStream } from './own-objects.js';
import { show } from './show.js';

/** @throws DeviceError, DisposedError unless it is a stream, and open */
export function expectStream(operation: string, stream: unknown): asserts stream is Stream {
  if (!isStream(stream)) {
    throw new DeviceError(`${operation}: ${show(stream)} is no stream; make one with device.createStream().`, {
      subject: 'stream',
    });
  }
  stream.assertUsable();
}
