import type { Device, Stream } from './handles.js';

const devices = new WeakSet();
const streams = new WeakSet();

/** Says that this package made a device, or a stream. */
export function ownDevice(device: Device): void {
  devices.add(device);
}

export function ownStream(stream: Stream): void {
  streams.add(stream);
}

/** Whether this package made it: neither a look-alike nor a proxy. */
export function isDevice(value: unknown): value is Device {
  return typeof value === 'object' && value !== null && devices.has(value);
}

/** The same of a stream. */
export function isStream(value: unknown): value is Stream {
  return typeof value === 'object' && value !== null && streams.has(value);
}
