import type { NativeTensor } from './native-handles.js';
import { byteSize, type DType } from './dtype.js';
import { ShapeError } from './errors.js';
import type { Device, MappedFile, Tensor } from './handles.js';
import { type Axes, checkedLayout, type Extents } from './layout.js';
import { expectOwnKey, ownKey } from './own-key.js';
import { show } from './show.js';
import { TensorObject } from './tensor.js';
import type { WatchedFile } from './watched-file.js';

export class MappedFileObject implements MappedFile {
  readonly path: string;
  readonly byteLength: number;
  readonly #bytes: TensorObject<'u8', ['byte']>;
  readonly #watched: WatchedFile;

  constructor(key: typeof ownKey, device: Device, watched: WatchedFile, native: NativeTensor, byteLength: number) {
    expectOwnKey(key, 'MappedFile', 'device.mapFile()');
    this.path = watched.path;
    this.#watched = watched;
    this.byteLength = byteLength;
    this.#bytes = new TensorObject(ownKey, {
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

  assertUnchanged(): void {
    this.#watched.assertUnchanged();
  }

  dispose(): void {
    this.#bytes.dispose();
    this.#watched.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}
