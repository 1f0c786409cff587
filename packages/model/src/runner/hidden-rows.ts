import type { Device, FloatDType, KvBytes, Stream, Tensor } from '@kv/sparse-core';

type Rows = Tensor<FloatDType, readonly ['token', 'hidden']>;

/** The rows of a batch between two layers, `[token, hidden]`, on the device, or in host memory while they wait. */
export class HiddenRows implements Disposable {
  readonly #device: Device;
  #rows: Rows;
  #isOnHost = false;

  /** @throws OutOfMemoryError */
  constructor(device: Device, dtype: FloatDType, rows: number, hiddenSize: number) {
    this.#device = device;
    this.#rows = device.tensor(dtype, ['token', 'hidden'], [rows, hiddenSize]);
  }

  get tensor(): Rows {
    return this.#rows;
  }

  get isOnHost(): boolean {
    return this.#isOnHost;
  }

  get bytes(): KvBytes {
    const { byteLength } = this.#rows;
    return this.#isOnHost ? { device: 0, host: byteLength } : { device: byteLength, host: 0 };
  }

  /** Room for the rows in host memory. @throws OutOfMemoryError */
  hostRoom(): Promise<Rows> {
    const { dtype, axes, shape } = this.#rows;
    return this.#device.hostTensor(dtype, axes, shape);
  }

  /** Enqueues the way to host memory; the device memory is free behind it. */
  moveToHost(stream: Stream, room: Rows): void {
    if (this.#isOnHost) room.dispose();
    else this.#move(stream, room, true);
  }

  /** Enqueues the way back. @throws OutOfMemoryError; nothing is changed then */
  moveToDevice(stream: Stream): void {
    const { dtype, axes, shape } = this.#rows;
    this.#move(stream, this.#device.tensor(dtype, axes, shape), false);
  }

  #move(stream: Stream, to: Rows, isOnHost: boolean): void {
    try {
      stream.copy(this.#rows, to);
    } catch (error) {
      to.dispose();
      throw error;
    }
    this.#rows.dispose();
    this.#rows = to;
    this.#isOnHost = isOnHost;
  }

  [Symbol.dispose](): void {
    this.#rows.dispose();
  }
}
