import { availableParallelism } from 'node:os';
import type { CudaReport, DeviceKind, InstructionSet, MemoryReport, NativeDevice } from './addon.js';
import { byteSize, type DType, dtypes, elementArrayName, type ElementArray, isElementArray } from './dtype.js';
import { CapabilityError, DTypeError, InvalidValueError, OutOfMemoryError, ShapeError } from './errors.js';
import { loadAddon } from './load-addon.js';
import { MappedFile } from './mapped-file.js';
import { fromNative } from './native-error.js';
import { Stream } from './stream.js';
import { type Axes, elementCount, type Extents, rowMajorStrides, Tensor } from './tensor.js';

export interface DeviceOptions {
  /** Default: 'cpu'. */
  readonly kind?: DeviceKind | undefined;
  /** Which of the machine's CUDA devices. Default: 0. */
  readonly index?: number | undefined;
  /** Threads that compute, the stream's own included. Default: one for each available core. */
  readonly threads?: number | undefined;
  /** Which build of the CPU kernels to use. Default: the widest that the processor runs. */
  readonly instructionSet?: InstructionSet | undefined;
  /** Bytes of tensors past which allocations are refused. Default: all that the device has. */
  readonly memoryLimit?: number | undefined;
}

/** A place where tensors live and operations run. */
export class Device {
  readonly kind: DeviceKind;
  readonly name: string;
  readonly threads: number;
  readonly native: NativeDevice;
  #defaultStream: Stream | undefined;

  constructor(kind: DeviceKind, threads: number, native: NativeDevice) {
    this.kind = kind;
    this.threads = threads;
    this.native = native;
    this.name = native.name();
  }

  get instructionSet(): InstructionSet {
    return this.native.instructionSet();
  }

  /** The stream of work that names none. */
  get defaultStream(): Stream {
    this.#defaultStream ??= this.createStream();
    return this.#defaultStream;
  }

  /** @throws OutOfMemoryError when the device has no room for another, or the process no thread */
  createStream(): Stream {
    try {
      return new Stream(this, this.native.createStream());
    } catch (error) {
      throw fromNative(error, { subject: 'stream' });
    }
  }

  /**
   * A new contiguous tensor. Without `data` its contents are unspecified.
   * @throws ShapeError when the shape is malformed or does not fit `data`
   * @throws OutOfMemoryError when it does not fit the device's memory limit
   */
  tensor<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    data?: ElementArray<D>,
  ): Tensor<D, A> {
    const strides = this.#stridesOf(dtype, axes, shape);
    if (data !== undefined) expectElements('tensor', dtype, shape, data);
    const bytes = elementCount(shape) * byteSize(dtype);
    try {
      const native = this.native.allocate(dtypes.indexOf(dtype), shape, strides, 0, bytes, data);
      return new Tensor({ device: this, native, dtype, axes, shape, strides, byteOffset: 0, base: undefined });
    } catch (error) {
      if ((error as { code?: string }).code !== 'KV_OUT_OF_MEMORY') throw error;
      const { live, limit } = this.memory();
      throw new OutOfMemoryError(
        `${bytes} bytes were asked for on ${this.name}, where ${live} of ${limit} are in use. ` +
          'Dispose tensors, use a smaller batch or context, or raise memoryLimit.',
        { subject: 'tensor', given: bytes, wanted: limit - live, cause: error },
      );
    }
  }

  /**
   * A tensor over memory that JavaScript owns (an array over an ArrayBuffer or SharedArrayBuffer), without a
   * copy. Do not transfer or resize the buffer while the tensor or enqueued work uses it.
   * @throws ShapeError, DTypeError when the array does not fit
   */
  wrap<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    memory: ElementArray<D>,
  ): Tensor<D, A> {
    const strides = this.#stridesOf(dtype, axes, shape);
    expectElements('wrap', dtype, shape, memory);
    const native = this.native.wrap(dtypes.indexOf(dtype), shape, strides, 0, memory);
    return new Tensor({ device: this, native, dtype, axes, shape, strides, byteOffset: 0, base: undefined });
  }

  /**
   * Maps a file into memory, read-only, without reading it. The file must not shrink while it is mapped.
   * @throws ModelFormatError when it cannot be opened or is empty
   */
  async mapFile(path: string): Promise<MappedFile> {
    try {
      const { tensor, byteLength } = await loadAddon().mapFile(this.native, path);
      return new MappedFile(this, path, tensor, byteLength);
    } catch (error) {
      throw fromNative(error, { subject: path });
    }
  }

  memory(): MemoryReport {
    return this.native.memory();
  }

  #stridesOf<A extends Axes>(dtype: DType, axes: A, shape: Extents<A>): Extents<A> {
    if (!dtypes.includes(dtype)) {
      throw new DTypeError(`'${dtype}' is not a dtype; use one of ${dtypes.join(', ')}.`, {
        subject: 'tensor',
        given: dtype,
        wanted: dtypes,
      });
    }
    const valid = shape.every((extent) => Number.isSafeInteger(extent) && extent >= 0);
    if (axes.length !== shape.length || axes.length > maxRank || !valid) {
      throw new ShapeError(
        `A tensor of axes [${axes.join(', ')}] and shape [${shape.join(', ')}] was asked for; give one ` +
          `non-negative integer for each axis, and at most ${maxRank} axes.`,
        { subject: 'tensor', given: shape, wanted: axes },
      );
    }
    return rowMajorStrides(shape);
  }
}

function expectElements(name: string, dtype: DType, shape: readonly number[], elements: ElementArray): void {
  if (!isElementArray(dtype, elements)) {
    const given = (elements as object).constructor.name;
    throw new DTypeError(`${name}: ${dtype} elements come in a ${elementArrayName(dtype)}; a ${given} was given.`, {
      subject: name,
      given,
      wanted: elementArrayName(dtype),
    });
  }
  const wanted = elementCount(shape);
  if (elements.length !== wanted) {
    throw new ShapeError(
      `${name}: ${elements.length} elements were given for the shape [${shape.join(', ')}], which has ${wanted}.`,
      { subject: name, given: elements.length, wanted },
    );
  }
}

const maxRank = 6;
const maxThreads = 1024;

/**
 * Opens a device.
 * @throws InvalidValueError when an option is out of its domain
 * @throws CapabilityError when this build or machine does not have what was asked for
 * @throws OutOfMemoryError when the process can have no such number of threads
 */
export function createDevice(options: DeviceOptions = {}): Device {
  const { kind = 'cpu', index = 0, threads = availableParallelism(), instructionSet, memoryLimit = 0 } = options;
  if (!['cpu', 'cuda'].includes(kind)) {
    throw new CapabilityError(`A device of kind '${kind}' was asked for; there are 'cpu' and 'cuda'.`, {
      subject: 'kind',
      given: kind,
      wanted: ['cpu', 'cuda'],
    });
  }
  if (!Number.isInteger(threads) || threads < 1 || threads > maxThreads) {
    throw new InvalidValueError(
      `threads is ${threads}; it must be a whole number from 1 to ${maxThreads}.`,
      { subject: 'threads', given: threads, wanted: [1, maxThreads] },
    );
  }
  if (!Number.isSafeInteger(memoryLimit) || memoryLimit < 0) {
    throw new InvalidValueError(`memoryLimit is ${memoryLimit}; it must be a whole number of bytes.`, {
      subject: 'memoryLimit',
      given: memoryLimit,
    });
  }
  const addon = loadAddon();
  try {
    return new Device(kind, threads, new addon.NativeDevice(kind, index, threads, instructionSet, memoryLimit));
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
