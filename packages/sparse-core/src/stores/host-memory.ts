import { DeviceError, InvalidValueError } from '../errors.js';
import type { Device } from '../handles.js';
import type { HostPool } from '../host-pool.js';

/** Makes tensors in host memory. */
export type HostMemory = Pick<HostPool, 'tensor'>;

/** Tensors of a pool begin at multiples of this. */
const alignment = 256;

/** What a tensor takes of a pool. */
export function bytesOfPool(bytes: number): number {
  return Math.ceil(bytes / alignment) * alignment;
}

/**
 * The host memory of a cache: the pool, or, where the device is the host, the device's.
 * @throws InvalidValueError when a pool is needed and there is none; DeviceError when it is another device's
 */
export function hostMemoryOf(operation: string, device: Device, pool: HostPool | undefined, bytes: number): HostMemory {
  if (pool === undefined && device.kind === 'cpu') return device;
  if (pool === undefined) {
    throw new InvalidValueError(
      `${operation}: hostPool is undefined, and ${device.name} has memory of its own. Make one: ` +
        `hostPool: await hostPool(device, { bytes: ${bytes} }).`,
      { subject: 'hostPool', given: pool, wanted: bytes },
    );
  }
  if (pool.device === device) return pool;
  throw new DeviceError(`${operation}: hostPool is of ${pool.device.name}, not of the device of the cache, ${device.name}.`, {
    subject: 'hostPool',
    given: pool.device.name,
    wanted: device.name,
  });
}
