import type { DeviceKind, InstructionSet, MemoryReport, NativeDevice, NativeStream, NativeTensor } from './native-handles.js';
import type { DType, ElementArray } from './dtype.js';
import type { Axes, Extents } from './layout.js';
import type { MemoryStreams } from './memory-streams.js';

// What this package hands out. Each of these knows the others, so they stand in one file, apart from the classes.

/** A place where tensors live and operations run. */
export interface Device {
  readonly kind: DeviceKind;
  readonly name: string;
  readonly threads: number;
  readonly native: NativeDevice;
  readonly instructionSet: InstructionSet;
  /**
   * How many rows of memory a thread of the CPU reads at once, in linear layers of few rows. It changes speed, never a
   * result. A process measures in the background what is fastest on its processor, unless `createDevice` was told.
   */
  memoryStreams(): Promise<MemoryStreams>;
  /** The cache of a core in which these layers, and decode attention, ask for memory ahead of its use. It is measured, like `memoryStreams`. */
  prefetchCache(): Promise<1 | 2>;
  /** How often these layers ask for a line of memory: some cores drop requests. It is measured, like `memoryStreams`. */
  prefetchRequests(): Promise<1 | 6>;
  /** The stream of work that names none. */
  readonly defaultStream: Stream;
  /** @throws OutOfMemoryError when the device has no room for another, or the process no thread; InvalidValueError */
  createStream(options?: StreamOptions): Stream;
  /**
   * A new contiguous tensor. Without `data` its contents are unspecified.
   * @throws DTypeError, ShapeError when axes or shape are malformed or do not fit `data`
   * @throws OutOfMemoryError when it does not fit the device's memory limit
   */
  tensor<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    data?: ElementArray<D>,
  ): Tensor<D, A>;
  /**
   * A tensor over memory that JavaScript owns (an array over an ArrayBuffer or SharedArrayBuffer), without a
   * copy. From then on the buffer cannot be transferred to another thread: `postMessage` and `structuredClone` copy it
   * or throw, by the version of Node. Once it was detached in another way (`buffer.transfer()`, a WebAssembly memory
   * that grew) the tensor can no longer be used; do not do that while enqueued work uses it. A GPU copies from and to it;
   * its kernels take tensors of `tensor()` and `hostTensor()`.
   * @throws DTypeError, ShapeError when the array does not fit, InvalidValueError when its buffer is resizable
   */
  wrap<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    memory: ElementArray<D>,
  ): Tensor<D, A>;
  /**
   * A new contiguous tensor in host memory, which this device's kernels and copies reach by address. On CUDA it is
   * pinned, off the JavaScript thread, as `hostPool` does; on the CPU it is plain memory. Its contents are unspecified.
   * @throws DTypeError, ShapeError when axes or shape are malformed
   * @throws OutOfMemoryError as `hostPool` does
   */
  hostTensor<D extends DType, const A extends Axes>(dtype: D, axes: A, shape: Extents<A>): Promise<Tensor<D, A>>;
  /**
   * Maps a file into memory, read-only, without reading it. The file must not shrink while it is mapped:
   * `MappedFile.assertUnchanged` tells.
   * @throws ModelFormatError when it cannot be opened or is empty, InvalidValueError when `path` is no path
   */
  mapFile(path: string): Promise<MappedFile>;
  memory(): MemoryReport;
}

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
export interface Stream extends Disposable {
  readonly device: Device;
  readonly native: NativeStream;
  /** Whether `record` is collecting what is enqueued. */
  readonly recording: boolean;
  /** The stream in whose order this one's work runs: itself, or the one that records it. */
  readonly runsOn: Stream;
  /** @throws DisposedError */
  assertUsable(): void;
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
  record(enqueue: () => unknown): Recording;
  /**
   * Enqueues everything that was recorded.
   * @throws DisposedError, DeviceError when the recording is another stream's, CapabilityError while `record`
   * collects, InvalidValueError when it is no recording
   */
  replay(recording: Recording): void;
  /**
   * Resolves when everything enqueued so far is done.
   * @throws the first failure of an operation on this stream, with the operation's name
   */
  synchronize(): Promise<void>;
  /** What a wait that the addon has just begun comes to; all of them pass here. */
  waited<Result>(wait: Promise<Result>): Promise<Result>;
  /**
   * Tells, whenever it is asked, whether a wait has shown that all that was enqueued before this call is done. It waits for
   * nothing itself.
   */
  progress(): () => boolean;
  /**
   * What is enqueued here from now on runs after all that is enqueued on `other` so far. On CUDA it is an event: nobody
   * waits but the device. A failure before it, on `other`, fails this stream too, unless this one takes the place of a
   * stream that failed (`takesFailure: false`).
   *
   * While `other` records, this stream becomes part of its recording (`record` says how).
   * @throws DisposedError, DeviceError when `other` is no stream or of another device, CapabilityError when this stream
   * records and `other` is not part of that, InvalidValueError when it is this stream
   */
  waitFor(other: Stream, options?: WaitOptions): void;
  /**
   * Stores `source` in a contiguous tensor, in stream order. The array may be changed at once.
   * @throws DTypeError, ShapeError when it does not fit the tensor, InvalidValueError when the tensor is read-only
   */
  write<D extends DType>(tensor: TensorHandle<D>, source: ElementArray<D>): void;
  /**
   * Copies a tensor into a contiguous one of the same dtype and element count, in stream order. One of the
   * two may be on the CPU when the stream is of another device. Of several sources, each contiguous, the elements follow
   * each other; sources that do so in memory already take one copy.
   * @throws DTypeError, ShapeError when they differ, InvalidValueError when they share memory or the destination is
   * read-only
   */
  copy<D extends DType, A extends Axes>(
    source: TensorHandle<D, A> | readonly TensorHandle<D, A>[],
    destination: TensorHandle<D, A>,
  ): void;
  /** Drops what has not begun; waits that are still pending reject. */
  dispose(): void;
}

/**
 * A typed view of memory on a device. The axes are part of the type, so that a `[token, kvHead, dim]`
 * tensor does not compile where `[kvHead, token, dim]` is wanted.
 */
export interface TensorHandle<D extends DType = DType, A extends Axes = Axes> {
  readonly dtype: D;
  readonly axes: A;
  readonly shape: Extents<A>;
  /** Distance of neighbours along each axis, in elements. */
  readonly strides: Extents<A>;
  readonly device: Device;
  /** Bytes of the elements that the shape spans (not of gaps between them). */
  readonly byteLength: number;
  readonly disposed: boolean;
  /** Whether no operation may write to it: a file that was mapped. */
  readonly readOnly: boolean;
  /**
   * Copies the elements to JavaScript, in row-major order, when everything enqueued on `stream` so far is
   * done. Without an argument: the stream that last wrote to the tensor.
   * @throws DisposedError when the tensor was disposed, DeviceError when the stream is of another device,
   * OutOfMemoryError when no array of JavaScript can hold the elements
   */
  read(stream?: Stream): Promise<ElementArray<D>>;
  /** The part `start <= index < end` of one axis, without a copy. @throws ShapeError when out of range */
  slice(axis: A[number], start: number, end: number): TensorHandle<D, A>;
  /**
   * The same elements under other axes, without a copy: axes whose elements follow each other evenly may be split and
   * joined, any axis renamed. @throws ShapeError when the counts differ, or elements would have to move
   */
  view<const B extends Axes>(axes: B, shape: Extents<B>): TensorHandle<D, B>;
  /** Returns the memory once the work that is already enqueued is done. Views of it become unusable. */
  dispose(): void;
  [Symbol.dispose](): void;
}

/** A tensor as this package makes it: with what its operations hand to native code. */
export interface Tensor<D extends DType = DType, A extends Axes = Axes> extends TensorHandle<D, A> {
  readonly native: NativeTensor;
  readonly writer: Stream;
  /** Remembers in which stream's order the tensor is written, for `read()`. */
  writtenBy(stream: Stream): void;
  slice(axis: A[number], start: number, end: number): Tensor<D, A>;
  view<const B extends Axes>(axes: B, shape: Extents<B>): Tensor<D, B>;
  /** A view of the same memory under another type; the caller has checked the bounds. */
  derive<E extends DType, B extends Axes>(
    dtype: E,
    axes: B,
    shape: Extents<B>,
    strides: Extents<B>,
    byteOffset: number,
  ): Tensor<E, B>;
}

/** Operations that `stream.record` collected, for `stream.replay`. */
export interface Recording extends Disposable {
  readonly stream: Stream;
  /** Returns what it holds once the replays that are already enqueued are done. */
  dispose(): void;
}

/** A file mapped into memory, read-only. Tensors over it cost no memory until they are read. */
export interface MappedFile extends Disposable {
  readonly path: string;
  readonly byteLength: number;
  /**
   * A tensor over part of the file. On a device with memory of its own it is a copy there, and an offset that is not
   * a multiple of the element size costs a copy too; copies are made on the device's default stream.
   * @throws DTypeError, ShapeError when axes or shape are malformed or reach past the end of the file
   */
  tensor<D extends DType, const A extends Axes>(dtype: D, axes: A, shape: Extents<A>, byteOffset: number): Tensor<D, A>;
  /**
   * Whether the file is as it was when it was mapped. A file that shrinks ends the process that reads what is gone, and
   * one that is written to gives other numbers: ask before work that reads it.
   * @throws ModelFormatError when its size or its time of change is another
   */
  assertUnchanged(): void;
  /** Unmaps the file once enqueued work is done. Tensors over it become unusable, copies of its parts do not. */
  dispose(): void;
}
