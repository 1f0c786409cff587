import { type BigIntStats, close, fstatSync, open } from 'node:fs';
import { promisify } from 'node:util';

import { DisposedError, ModelFormatError } from './errors.js';

const openDescriptor = promisify(open);
/** Of files that nobody disposed of: a FileHandle would warn of them, and end the process in some Node to come. */
const forgotten = new FinalizationRegistry<number>(closeDescriptor);

/** A file whose bytes must stay as they are while they are used: its descriptor, and what the file was like. */
export class WatchedFile implements Disposable {
  readonly path: string;
  #descriptor: number | undefined;
  readonly #opened: BigIntStats;

  private constructor(path: string, descriptor: number) {
    this.path = path;
    this.#descriptor = descriptor;
    forgotten.register(this, descriptor, this);
    this.#opened = fstatSync(descriptor, { bigint: true });
  }

  /** @throws ModelFormatError */
  static async open(path: string): Promise<WatchedFile> {
    const descriptor = await openDescriptor(path, 'r').catch((cause: unknown) => {
      throw new ModelFormatError(`${path} cannot be opened (${cause instanceof Error ? cause.message : String(cause)}).`, { subject: path, cause });
    });
    return new WatchedFile(path, descriptor);
  }

  /**
   * Some 2 µs. A file that another took the name of has not changed: the descriptor is of the first.
   * @throws ModelFormatError when the file was truncated, extended or written to; DisposedError
   */
  assertUnchanged(): void {
    if (this.#descriptor === undefined) throw new DisposedError(`${this.path} was unmapped; map it again.`, { subject: this.path });
    const now = fstatSync(this.#descriptor, { bigint: true });
    const { size, mtimeNs } = this.#opened;
    if (now.size === size && now.mtimeNs === mtimeNs) return;
    const [given, wanted] = now.size === size ? [timeOf(now.mtimeNs), timeOf(mtimeNs)] : [bytesOf(now.size), bytesOf(size)];
    throw new ModelFormatError(
      `${this.path} was changed while it was in use: it has ${given}, and had ${wanted}. Open it again; replace a file ` +
        'that is in use by renaming another over it.',
      { subject: this.path, given, wanted },
    );
  }

  dispose(): void {
    if (this.#descriptor === undefined) return;
    forgotten.unregister(this);
    closeDescriptor(this.#descriptor);
    this.#descriptor = undefined;
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

function closeDescriptor(descriptor: number): void {
  close(descriptor, () => undefined);
}

function bytesOf(size: bigint): string {
  return `${size} bytes`;
}

function timeOf(nanoseconds: bigint): string {
  return `a time of change of ${new Date(Number(nanoseconds / 1_000_000n)).toISOString()}`;
}
