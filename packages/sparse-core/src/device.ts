import { availableParallelism } from 'node:os';
import type { CudaReport } from './addon.js';
import type { DeviceKind, InstructionSet, MemoryReport, NativeDevice } from './native-handles.js';
import { byteSize, type DType, dtypes, type ElementArray, expectElements } from './dtype.js';
import { CapabilityError, InvalidValueError, OutOfMemoryError } from './errors.js';
import type { Device, MappedFile, Stream, StreamOptions, Tensor } from './handles.js';
import { hostPool } from './host-pool.js';
import { type Axes, checkedLayout, type Extents } from './layout.js';
import { loadAddon } from './load-addon.js';
import { MappedFileObject } from './mapped-file.js';
import { type MemoryStreams, memoryStreams as numbersOfStreams } from './memory-streams.js';
import { fromNative } from './native-error.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { ownDevice } from './own-objects.js';
import { show } from './show.js';
import { StreamObject } from './stream.js';
import { owningTensor } from './tensor.js';
import { expectCallback, expectOptions } from './validate.js';
import { WatchedFile } from './watched-file.js';
import { holdInPlace } from './wrapped-memory.js';

export interface DeviceOptions {
  /** Default: 'cpu'. */
  readonly kind?: DeviceKind | undefined;
  /** Which of the machine's CUDA devices. Default: 0. */
  readonly index?: number | undefined;
  /** Threads that compute, the stream's own included. Default: one for each available core. */
  readonly threads?: number | undefined;
  /** Which build of the CPU kernels to use. Default: the widest that the processor and the system let run. */
  readonly instructionSet?: InstructionSet | undefined;
  /**
   * How many rows of memory a thread reads at once: 1, 2 or 4. They are then asked for once, in the first cache. Default: what is
   * measured to be fastest.
   */
  readonly memoryStreams?: MemoryStreams | undefined;
  /** Bytes of tensors past which allocations are refused. Default: all that the device has. */
  readonly memoryLimit?: number | undefined;
}

export class DeviceObject implements Device {
  readonly kind: DeviceKind;
  readonly name: string;
  readonly threads: number;
  readonly native: NativeDevice;
  #defaultStream: Stream | undefined;

  constructor(key: typeof ownKey, kind: DeviceKind, threads: number, native: NativeDevice) {
    expectOwnKey(key, 'Device', 'createDevice()');
    this.kind = kind;
    this.threads = threads;
    this.native = native;
    this.name = native.name();
    ownDevice(this);
  }

  get instructionSet(): InstructionSet {
    return this.native.instructionSet();
  }

  async memoryStreams(): Promise<MemoryStreams> {
    return (await this.native.memoryReading()).streams;
  }

  async prefetchCache(): Promise<1 | 2> {
    return (await this.native.memoryReading()).cache;
  }

  async prefetchRequests(): Promise<1 | 6> {
    return (await this.native.memoryReading()).requests;
  }

  get defaultStream(): Stream {
    this.#defaultStream ??= this.createStream();
    return this.#defaultStream;
  }

  createStream(options: StreamOptions = {}): Stream {
    expectOptions('createStream', options, { onFailure: true });
    expectCallback('createStream', 'onFailure', options.onFailure);
    try {
      return new StreamObject(ownKey, this, this.native.createStream(), options);
    } catch (error) {
      throw fromNative(error, { subject: 'stream' });
    }
  }

  tensor<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    data?: ElementArray<D>,
  ): Tensor<D, A> {
    const layout = checkedLayout('tensor', dtype, axes, shape);
    if (data !== undefined) expectElements('tensor', dtype, layout.elements, data);
    const bytes = layout.elements * byteSize(dtype);
    try {
      if (!Number.isSafeInteger(bytes)) throw Object.assign(new RangeError('No memory is as large.'), { code: 'KV_OUT_OF_MEMORY' });
      const native = this.native.allocate(dtypes.indexOf(dtype), layout.shape, layout.strides, 0, bytes, data);
      return owningTensor(this, native, dtype, layout);
    } catch (error) {
      if ((error as { code?: string }).code !== 'KV_OUT_OF_MEMORY') throw fromNative(error, { subject: 'tensor' });
      const { live, limit } = this.memory();
      throw new OutOfMemoryError(
        `${bytes} bytes were asked for on ${this.name}, where ${live} of ${limit} are in use. ` +
          'Dispose tensors, use a smaller batch or context, or raise memoryLimit.',
        { subject: 'tensor', given: bytes, wanted: limit - live, cause: error },
      );
    }
  }

  wrap<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    memory: ElementArray<D>,
  ): Tensor<D, A> {
    const layout = checkedLayout('wrap', dtype, axes, shape);
    expectElements('wrap', dtype, layout.elements, memory);
    holdInPlace(memory);
    try {
      const native = this.native.wrap(dtypes.indexOf(dtype), layout.shape, layout.strides, 0, memory);
      return owningTensor(this, native, dtype, layout, this.kind !== 'cpu');
    } catch (error) {
      throw fromNative(error, { subject: 'wrap' });
    }
  }

  async hostTensor<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
  ): Promise<Tensor<D, A>> {
    const { elements } = checkedLayout('hostTensor', dtype, axes, shape);
    using pool = await hostPool(this, { bytes: Math.max(1, elements * byteSize(dtype)) });
    return pool.tensor(dtype, axes, shape);
  }

  async mapFile(path: string): Promise<MappedFile> {
    if (typeof path !== 'string' || path.includes('\0')) {
      throw new InvalidValueError(`mapFile: ${show(path)} is not the path of a file.`, { subject: 'path', given: path });
    }
    try {
      const { tensor, byteLength } = await loadAddon().mapFile(this.native, path);
      return new MappedFileObject(ownKey, this, await WatchedFile.open(path), tensor, byteLength);
    } catch (error) {
      throw fromNative(error, { subject: path });
    }
  }

  memory(): MemoryReport {
    return this.native.memory();
  }
}

const maxThreads = 1024;
const maxIndex = 2 ** 31 - 1;

/**
 * Opens a device.
 * @throws InvalidValueError when an option is out of its domain
 * @throws CapabilityError when this build or machine does not have what was asked for
 * @throws OutOfMemoryError when the process can have no such number of threads
 */
export function createDevice(options: DeviceOptions = {}): Device {
  expectOptions('createDevice', options, { kind: true, index: true, threads: true, instructionSet: true, memoryStreams: true, memoryLimit: true });
  const { kind = 'cpu', index = 0, threads = availableParallelism(), instructionSet, memoryLimit = 0, memoryStreams } = options;
  if (!['cpu', 'cuda'].includes(kind)) {
    throw new CapabilityError(`A device of kind ${show(kind)} was asked for; there are 'cpu' and 'cuda'.`, {
      subject: 'kind',
      given: kind,
      wanted: ['cpu', 'cuda'],
    });
  }
  if (!Number.isInteger(index) || index < 0 || index > maxIndex) {
    throw new InvalidValueError(`index is ${show(index)}; it must be the number of a device, from 0.`, {
      subject: 'index',
      given: index,
      wanted: [0, maxIndex],
    });
  }
  if (instructionSet !== undefined && typeof instructionSet !== 'string') {
    throw new InvalidValueError(`instructionSet is ${show(instructionSet)}; it must be a name, such as 'avx2'.`, {
      subject: 'instructionSet',
      given: instructionSet,
    });
  }
  if (!Number.isInteger(threads) || threads < 1 || threads > maxThreads) {
    throw new InvalidValueError(
      `threads is ${show(threads)}; it must be a whole number from 1 to ${maxThreads}.`,
      { subject: 'threads', given: threads, wanted: [1, maxThreads] },
    );
  }
  if (!Number.isSafeInteger(memoryLimit) || memoryLimit < 0) {
    throw new InvalidValueError(`memoryLimit is ${show(memoryLimit)}; it must be a whole number of bytes.`, {
      subject: 'memoryLimit',
      given: memoryLimit,
    });
  }
  if (memoryStreams !== undefined && !numbersOfStreams.includes(memoryStreams)) {
    throw new InvalidValueError(`memoryStreams is ${show(memoryStreams)}; it must be 1, 2 or 4, or left out.`, {
      subject: 'memoryStreams',
      given: memoryStreams,
      wanted: numbersOfStreams,
    });
  }
  const addon = loadAddon();
  try {
    const native = new addon.NativeDevice(kind, index, threads, instructionSet, memoryLimit, memoryStreams);
    return new DeviceObject(ownKey, kind, threads, native);
  } catch (error) {
    throw fromNative(error, { subject: 'device', given: options });
  }
}

/** What there is of CUDA on this machine and in this build, and why there is no more. */
export function cudaReport(): CudaReport {
  return loadAddon().cudaReport();
}

/** The kinds of device that this build and machine can open. */
export function devices(): readonly DeviceKind[] {
  return cudaReport().devices.length > 0 ? ['cpu', 'cuda'] : ['cpu'];
}
