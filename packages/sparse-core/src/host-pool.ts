import type { NativeHostPool } from './native-handles.js';
import { byteSize, type DType, dtypes } from './dtype.js';
import { DeviceError, DisposedError, OutOfMemoryError } from './errors.js';
import type { Device, Tensor } from './handles.js';
import { type Axes, checkedLayout, type Extents } from './layout.js';
import { fromNative } from './native-error.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { isDevice } from './own-objects.js';
import { show } from './show.js';
import { owningTensor } from './tensor.js';
import { expectCallback, expectOptions, expectSignal, expectThat } from './validate.js';

export interface HostPoolProgress {
  /** Of memory that is made. */
  readonly bytes: number;
  readonly total: number;
}

export interface HostPoolOptions {
  /** What all tensors of the pool may take together, each rounded up to 256. */
  readonly bytes: number;
  /** Called after each 64 MiB. */
  readonly onProgress?: ((progress: HostPoolProgress) => void) | undefined;
  readonly signal?: AbortSignal | undefined;
}

/** The part of the host's free memory that may be pinned: without the rest the system swaps, or ends processes. */
const mostOfHostMemory = 0.95;

/**
 * Host memory that tensors are made in at once, by functions that cannot wait. On CUDA it is pinned, 64 MiB at a time,
 * off the JavaScript thread: 2 GiB take 0.7 s. On the CPU it is plain memory.
 * @throws DeviceError, InvalidValueError when an argument is none of its kind
 * @throws OutOfMemoryError when that is more than the process may lock (`ulimit -l`), than 95 % of the host's free
 * memory, or than the memory limit of a CPU device
 * @throws the signal's reason when it is aborted; what was made is given back then
 */
export async function hostPool(device: Device, options: HostPoolOptions): Promise<HostPool> {
  if (!isDevice(device)) {
    throw new DeviceError(`hostPool: ${show(device)} is no device; open one with createDevice().`, { subject: 'device' });
  }
  expectOptions('hostPool', options, { bytes: true, onProgress: true, signal: true });
  const { bytes, onProgress, signal } = options;
  expectThat('hostPool', 'bytes', bytes, Number.isSafeInteger(bytes) && bytes > 0, 'a positive whole number');
  expectCallback('hostPool', 'onProgress', onProgress);
  expectSignal('hostPool', signal);
  signal?.throwIfAborted();
  const free = Math.floor(process.availableMemory() * mostOfHostMemory);
  if (device.kind !== 'cpu' && bytes > free) {
    throw new OutOfMemoryError(
      `hostPool: ${bytes} bytes of pinned memory were asked for; the host has ${free} that may be pinned. ` +
        'Ask for less, or free memory.',
      { subject: 'bytes', given: bytes, wanted: free },
    );
  }
  let native: NativeHostPool | undefined;
  try {
    native = device.native.hostPool(bytes);
    for (let made = 0; made < bytes; ) {
      made = Math.min(bytes, await native.makeSlab());
      signal?.throwIfAborted();
      onProgress?.({ bytes: made, total: bytes });
    }
  } catch (error) {
    native?.release();
    throw fromNative(error, { subject: 'hostPool', given: bytes });
  }
  return new HostPool(ownKey, device, bytes, native);
}

/** Memory of the host, made by `hostPool`, for tensors of a device. */
export class HostPool implements Disposable {
  readonly device: Device;
  readonly byteLength: number;
  readonly #native: NativeHostPool;
  #disposed = false;

  /** Whether it is one, and no look-alike or proxy. */
  static is(value: unknown): value is HostPool {
    return typeof value === 'object' && value !== null && #native in value;
  }

  constructor(key: typeof ownKey, device: Device, byteLength: number, native: NativeHostPool) {
    expectOwnKey(key, 'HostPool', 'hostPool()');
    this.device = device;
    this.byteLength = byteLength;
    this.#native = native;
  }

  /** Bytes that no tensor holds. A tensor that was disposed holds its own until the device is done with them. */
  get available(): number {
    this.#assertUsable();
    return this.#native.available();
  }

  /**
   * A contiguous tensor in host memory, which the device's kernels and copies reach by address. Its contents are
   * unspecified. It may outlive the pool.
   * @throws DTypeError, ShapeError when axes or shape are malformed
   * @throws OutOfMemoryError when the pool has no room for it in one piece, DisposedError
   */
  tensor<D extends DType, const A extends Axes>(dtype: D, axes: A, shape: Extents<A>): Tensor<D, A> {
    this.#assertUsable();
    const layout = checkedLayout('tensor', dtype, axes, shape);
    const bytes = layout.elements * byteSize(dtype);
    try {
      const native = this.#native.take(dtypes.indexOf(dtype), layout.shape, layout.strides, 0, bytes);
      return owningTensor(this.device, native, dtype, layout);
    } catch (error) {
      if ((error as { code?: string }).code !== 'KV_OUT_OF_MEMORY') throw fromNative(error, { subject: 'tensor' });
      throw new OutOfMemoryError(
        `${bytes} bytes were asked for of a host pool of ${this.byteLength}, which has ${this.available} left, perhaps not ` +
          'in one piece. Dispose tensors of the pool, or make a larger one.',
        { subject: 'tensor', given: bytes, wanted: this.available, cause: error },
      );
    }
  }

  /** The memory goes once the pool's tensors are disposed and the device is done with them. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    this.#native.release();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }

  #assertUsable(): void {
    if (!this.#disposed) return;
    throw new DisposedError('The host pool was disposed; make another with hostPool().', { subject: 'hostPool' });
  }
}
