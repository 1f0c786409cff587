import type { NativeTensor } from './addon.js';
import type { Device } from './device.js';
import { byteSize, type DType } from './dtype.js';
import { ShapeError } from './errors.js';
import { type Axes, checkedLayout, type Extents } from './layout.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { show } from './show.js';
import { Tensor } from './tensor.js';
import type { WatchedFile } from './watched-file.js';

/** A file mapped into memory, read-only. Tensors over it cost no memory until they are read. */
export class MappedFile {
  readonly path: string;
  readonly byteLength: number;
  readonly #bytes: Tensor<'u8', ['byte']>;
  readonly #watched: WatchedFile;

  constructor(key: typeof ownKey, device: Device, watched: WatchedFile, native: NativeTensor, byteLength: number) {
    expectOwnKey(key, 'MappedFile', 'device.mapFile()');
    this.path = watched.path;
    this.#watched = watched;
    this.byteLength = byteLength;
    this.#bytes = new Tensor(ownKey, {
      device,
      native,
      dtype: 'u8',
      axes: ['byte'],
      shape: [byteLength],
      strides: [1],
      byteOffset: 0,
      base: undefined,
      readOnly: true,
      hostOnly: device.kind !== 'cpu',
    });
  }

  /**
   * A tensor over part of the file. On a device with memory of its own it is a copy there, and an offset that is not
   * a multiple of the element size costs a copy too; copies are made on the device's default stream.
   * @throws DTypeError, ShapeError when axes or shape are malformed or reach past the end of the file
   */
  tensor<D extends DType, const A extends Axes>(
    dtype: D,
    axes: A,
    shape: Extents<A>,
    byteOffset: number,
  ): Tensor<D, A> {
    const layout = checkedLayout(this.path, dtype, axes, shape);
    const bytes = layout.elements * byteSize(dtype);
    if (!Number.isSafeInteger(byteOffset) || byteOffset < 0 || byteOffset + bytes > this.byteLength) {
      throw new ShapeError(
        `${this.path}: ${bytes} bytes at offset ${show(byteOffset)} were asked for; ` +
          `the file has ${this.byteLength}.`,
        { subject: this.path, given: [byteOffset, bytes], wanted: this.byteLength },
      );
    }
    const { device } = this.#bytes;
    if (device.kind === 'cpu' && byteOffset % byteSize(dtype) === 0) {
      return this.#bytes.derive(dtype, layout.axes, layout.shape, layout.strides, byteOffset);
    }
    const copy = device.tensor(dtype, layout.axes, layout.shape);
    const source = this.#bytes.slice('byte', byteOffset, byteOffset + bytes);
    device.defaultStream.copy(source, copy.derive('u8', ['byte'], [bytes], [1], 0));
    copy.writtenBy(device.defaultStream);
    return copy;
  }

  /**
   * Whether the file is as it was when it was mapped. A file that shrinks ends the process that reads what is gone, and
   * one that is written to gives other numbers: ask before work that reads it.
   * @throws ModelFormatError when its size or its time of change is another
   */
  assertUnchanged(): void {
    this.#watched.assertUnchanged();
  }

  /** Unmaps the file once enqueued work is done. Tensors over it become unusable, copies of its parts do not. */
  dispose(): void {
    this.#bytes.dispose();
    this.#watched.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
