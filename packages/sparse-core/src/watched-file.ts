import { type BigIntStats, fstatSync } from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { ModelFormatError } from './errors.js';

/** A file whose bytes must stay as they are while they are used: its descriptor, and what the file was like. */
export class WatchedFile implements Disposable {
  readonly path: string;
  readonly #handle: FileHandle;
  readonly #size: bigint;
  readonly #modified: bigint;

  private constructor(path: string, handle: FileHandle, { size, mtimeNs }: BigIntStats) {
    this.path = path;
    this.#handle = handle;
    this.#size = size;
    this.#modified = mtimeNs;
  }

  static async open(path: string): Promise<WatchedFile> {
    const handle = await open(path);
    return new WatchedFile(path, handle, await handle.stat({ bigint: true }));
  }

  /**
   * Some 2 µs. A file that another took the name of has not changed: the descriptor is of the first.
   * @throws ModelFormatError when the file was truncated, extended or written to
   */
  assertUnchanged(): void {
    const { size, mtimeNs } = fstatSync(this.#handle.fd, { bigint: true });
    if (size === this.#size && mtimeNs === this.#modified) return;
    const [given, wanted] = size === this.#size ? [timeOf(mtimeNs), timeOf(this.#modified)] : [bytesOf(size), bytesOf(this.#size)];
    throw new ModelFormatError(
      `${this.path} was changed while it was in use: it has ${given}, and had ${wanted}. Open it again; replace a file ` +
        'that is in use by renaming another over it.',
      { subject: this.path, given, wanted },
    );
  }

  dispose(): void {
    this.#handle.close().catch(() => undefined);
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

function bytesOf(size: bigint): string {
  return `${size} bytes`;
}

function timeOf(nanoseconds: bigint): string {
  return `a time of change of ${new Date(Number(nanoseconds / 1_000_000n)).toISOString()}`;
}
