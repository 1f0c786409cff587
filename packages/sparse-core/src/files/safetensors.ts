import { open, rename, rm } from 'node:fs/promises';
import { InvalidValueError, ModelFormatError } from '../errors.js';
import { openFile, readBytes } from './open-file.js';
import { formatHeader, lengthFieldBytes, parseHeader, readHeaderLength } from './safetensors-header.js';
import type { SafetensorsHeader, StoredDType } from './safetensors-header.js';

/**
 * Reads and checks the header of one safetensors file; the data stay unread.
 * @throws ModelFormatError when the file is missing, truncated or malformed
 */
export async function readSafetensorsHeader(file: string): Promise<SafetensorsHeader> {
  const handle = await openFile(file);
  if (handle === undefined) {
    throw new ModelFormatError(`${file} cannot be opened: no such file. Fetch it, or correct the path.`, {
      subject: file,
      given: 'no such file',
      wanted: 'a safetensors file',
    });
  }
  try {
    const { size } = await handle.stat();
    const start = await readBytes(handle, 0, Math.min(size, lengthFieldBytes));
    const header = await readBytes(handle, lengthFieldBytes, readHeaderLength(file, start, size));
    return parseHeader(file, header, size);
  } finally {
    await handle.close();
  }
}

/** A tensor to write, and its elements in row-major order, little-endian. */
export interface TensorToStore {
  readonly dtype: StoredDType;
  readonly shape: readonly number[];
  readonly elements: NodeJS.TypedArray;
}

/**
 * Writes a safetensors file beside its final place and moves it there when it is whole, so that no half of one is ever at
 * `file`.
 * @throws InvalidValueError when it cannot be written; what was at `file` is still there then
 */
export async function writeSafetensors(
  file: string,
  tensors: Readonly<Record<string, TensorToStore>>,
  metadata: Readonly<Record<string, string>>,
): Promise<void> {
  const unfinished = `${file}.unfinished-${process.pid}`;
  try {
    const handle = await open(unfinished, 'w');
    try {
      await handle.writeFile(formatHeader(tensors, metadata));
      for (const { elements } of Object.values(tensors)) {
        await handle.writeFile(new Uint8Array(elements.buffer, elements.byteOffset, elements.byteLength));
      }
    } finally {
      await handle.close();
    }
    await rename(unfinished, file);
  } catch (cause) {
    await rm(unfinished, { force: true });
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidValueError(`${file} cannot be written (${reason}). Give a path in a directory that you may write to.`, {
      subject: file,
      cause,
    });
  }
}
