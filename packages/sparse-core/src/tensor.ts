import type { NativeTensor } from './native-handles.js';
import { byteSize, createElementArray, type DType, dtypes, type ElementArray } from './dtype.js';
import { DeviceError, DisposedError, OutOfMemoryError, ShapeError } from './errors.js';
import { type Axes, checkedLayout, elementCount, type Extents, isContiguous, type Layout, spanOf } from './layout.js';
import { loadAddon } from './load-addon.js';
import { expectStream } from './expect-stream.js';
import type { Device, Stream, Tensor, TensorHandle } from './handles.js';
import { fromNative } from './native-error.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { show } from './show.js';
import { viewStrides } from './view-strides.js';

/** What sparse-core itself knows of a tensor. */
export interface TensorParts<D extends DType, A extends Axes> {
  readonly device: Device;
  readonly native: NativeTensor;
  readonly dtype: D;
  readonly axes: A;
  readonly shape: Extents<A>;
  readonly strides: Extents<A>;
  readonly byteOffset: number;
  /** Whose memory it borrows. */
  readonly base: TensorObject | undefined;
  readonly readOnly: boolean;
  /** Whether kernels of the device cannot reach it: a wrapped array, or a file, where the device has its own memory. */
  readonly hostOnly: boolean;
}

export class TensorObject<D extends DType = DType, A extends Axes = Axes> implements Tensor<D, A> {
  readonly device: Device;
  readonly dtype: D;
  readonly axes: A;
  readonly shape: Extents<A>;
  readonly strides: Extents<A>;
  readonly byteLength: number;
  readonly readOnly: boolean;
  readonly hostOnly: boolean;
  readonly native: NativeTensor;
  readonly #byteOffset: number;
  readonly #base: TensorObject | undefined;
  #disposed = false;
  #writer: Stream | undefined;
  #firstByte: number | undefined;
  /** Bytes from the first element to the end of the last. */
  readonly #span: number;

  /** Whether this package made it: neither a look-alike nor a proxy. */
  static is(value: unknown): value is TensorObject {
    return typeof value === 'object' && value !== null && #disposed in value;
  }

  constructor(key: typeof ownKey, parts: TensorParts<D, A>) {
    expectOwnKey(key, 'Tensor', 'device.tensor()');
    this.device = parts.device;
    this.native = parts.native;
    this.dtype = parts.dtype;
    this.axes = Object.freeze(parts.axes);
    this.shape = Object.freeze(parts.shape);
    this.strides = Object.freeze(parts.strides);
    this.byteLength = elementCount(parts.shape) * byteSize(parts.dtype);
    this.readOnly = parts.readOnly;
    this.hostOnly = parts.hostOnly;
    this.#byteOffset = parts.byteOffset;
    this.#base = parts.base;
    this.#span = this.byteLength === 0 ? 0 : spanOf(parts.shape, parts.strides) * byteSize(parts.dtype);
    // What was checked of it stays true.
    Object.freeze(this);
  }

  get disposed(): boolean {
    return this.#disposed || this.#base?.disposed === true;
  }

  get contiguous(): boolean {
    return isContiguous(this.shape, this.strides);
  }

  /** The address of the first element, on its device. */
  get firstByte(): number {
    this.#firstByte ??= this.#base === undefined ? this.native.address() : this.#base.firstByte + this.#byteOffset;
    return this.#firstByte;
  }

  /** Behind the last element. */
  get endByte(): number {
    return this.firstByte + this.#span;
  }

  writtenBy(stream: Stream): void {
    if (this.#base === undefined) this.#writer = stream.runsOn;
    else this.#base.writtenBy(stream);
  }

  get writer(): Stream {
    return this.#base === undefined ? (this.#writer ?? this.device.defaultStream) : this.#base.writer;
  }

  async read(stream: Stream = this.writer): Promise<ElementArray<D>> {
    reachableFrom('read', 'tensor', this, stream);
    const destination = this.#elementArray();
    try {
      return await stream.waited(loadAddon().read(stream.native, this.native, destination));
    } catch (error) {
      throw fromNative(error, { subject: 'read' });
    }
  }

  #elementArray(): ElementArray<D> {
    try {
      return createElementArray(this.dtype, elementCount(this.shape));
    } catch (cause) {
      throw new OutOfMemoryError(
        `read: there is no room for an array of the ${this.byteLength} bytes of ${describe(this)}; read slices of it.`,
        { subject: 'read', given: this.byteLength, cause },
      );
    }
  }

  slice(axis: A[number], start: number, end: number): TensorObject<D, A> {
    const index = this.axes.indexOf(axis);
    const extent = this.shape[index];
    if (extent === undefined || !Number.isInteger(start) || !Number.isInteger(end) || start < 0 || end < start || end > extent) {
      throw new ShapeError(
        `slice: the range ${show(start)}..${show(end)} of axis ${show(axis)} does not lie in ${describe(this)}.`,
        { subject: 'slice', given: { axis, start, end }, wanted: { axes: this.axes, shape: this.shape } },
      );
    }
    const shape = this.shape.with(index, end - start) as unknown as Extents<A>;
    const offset = this.#byteOffset + start * (this.strides[index] ?? 0) * byteSize(this.dtype);
    return this.derive(this.dtype, this.axes, shape, this.strides, offset);
  }

  view<const B extends Axes>(axes: B, shape: Extents<B>): TensorObject<D, B> {
    const wanted = checkedLayout('view', this.dtype, axes, shape);
    const alike = wanted.elements === elementCount(this.shape);
    const strides = alike ? viewStrides(this.shape, this.strides, wanted.shape) : undefined;
    if (strides === undefined) {
      throw new ShapeError(
        `view: ${describe(this)} was given and [${wanted.axes.join(', ')}] of [${wanted.shape.join(', ')}] was asked ` +
          'for; a view has as many elements, and joins only axes whose elements follow each other.',
        { subject: 'view', given: { shape: this.shape, strides: this.strides }, wanted: wanted.shape },
      );
    }
    return this.derive(this.dtype, wanted.axes, wanted.shape, strides as unknown as Extents<B>, this.#byteOffset);
  }

  derive<E extends DType, B extends Axes>(
    dtype: E,
    axes: B,
    shape: Extents<B>,
    strides: Extents<B>,
    byteOffset: number,
  ): TensorObject<E, B> {
    this.assertUsable();
    const native = this.#nativeView(dtype, shape, strides, byteOffset);
    const base = this.#base ?? this;
    const { device, readOnly, hostOnly } = this;
    return new TensorObject(ownKey, { device, native, dtype, axes, shape, strides, byteOffset, base, readOnly, hostOnly });
  }

  #nativeView(dtype: DType, shape: readonly number[], strides: readonly number[], byteOffset: number): NativeTensor {
    try {
      return this.native.view(dtypes.indexOf(dtype), shape, strides, byteOffset);
    } catch (error) {
      throw fromNative(error, { subject: 'view' });
    }
  }

  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    if (this.#base === undefined) this.native.release();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }

  assertUsable(): void {
    if (this.disposed) {
      throw new DisposedError(`${describe(this)} was disposed; keep it until its last use is enqueued.`, {
        subject: 'tensor',
      });
    }
  }
}

/** A contiguous tensor that owns its memory, from its start on. */
export function owningTensor<D extends DType, A extends Axes>(
  device: Device,
  native: NativeTensor,
  dtype: D,
  { axes, shape, strides }: Layout<A>,
  hostOnly = false,
): TensorObject<D, A> {
  const parts = { device, native, dtype, axes, shape, strides, byteOffset: 0, base: undefined };
  return new TensorObject(ownKey, { ...parts, readOnly: false, hostOnly });
}

/**
 * A tensor argument as this package made it, alive.
 * @throws DeviceError, DisposedError
 */
function usableTensor(operation: string, name: string, tensor: unknown): TensorObject {
  if (!TensorObject.is(tensor)) {
    throw new DeviceError(
      `${operation}: ${name} is not a tensor of this package; wrap foreign memory with device.wrap().`,
      { subject: name },
    );
  }
  tensor.assertUsable();
  return tensor;
}

/**
 * The one boundary check of a tensor argument: made by this package, alive, on the stream's device.
 * @throws DeviceError, DisposedError
 */
export function nativeOf(operation: string, name: string, tensor: unknown, stream: Stream): TensorObject {
  expectStream(operation, stream);
  return tensorOn(operation, name, tensor, stream);
}

/** `nativeOf` for a stream that was checked. */
export function tensorOn(operation: string, name: string, tensor: unknown, stream: Stream): TensorObject {
  const native = usableTensor(operation, name, tensor);
  if (native.device !== stream.device) {
    throw new DeviceError(
      `${operation}: ${name} lives on one device, ${native.device.name}, and the stream is of another, ` +
        `${stream.device.name}. Make it on the stream's device, or copy it there first.`,
      { subject: name, given: native.device.name, wanted: stream.device.name },
    );
  }
  return native;
}

/**
 * A tensor to copy from or to: it may be the CPU's, whatever the stream's device.
 * @throws DeviceError, DisposedError
 */
export function reachableFrom(operation: string, name: string, tensor: unknown, stream: Stream): TensorObject {
  expectStream(operation, stream);
  const usable = usableTensor(operation, name, tensor);
  return usable.device.kind === 'cpu' && stream.device.kind !== 'cpu'
    ? usable
    : nativeOf(operation, name, usable, stream);
}

/** For messages: `f32 [token=3, hidden=8]`. */
export function describe(tensor: Pick<TensorHandle, 'dtype' | 'axes' | 'shape'>): string {
  const extents = tensor.axes.map((axis, index) => `${axis}=${String(tensor.shape[index])}`);
  return `${tensor.dtype} [${extents.join(', ')}]`;
}
