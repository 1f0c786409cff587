import { constants } from 'node:fs';
import { open } from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';

import { ModelFormatError } from '../errors.js';

/**
 * Opens a regular file for reading: undefined when it is not there. Anything else is refused before it is read, since
 * a FIFO is waited for and a device has no end.
 * @throws ModelFormatError when it cannot be opened or is no regular file
 */
export async function openFile(file: string): Promise<FileHandle | undefined> {
  let handle: FileHandle;
  try {
    handle = await open(file, constants.O_RDONLY | constants.O_NONBLOCK);
  } catch (cause) {
    const { code, message } = cause as NodeJS.ErrnoException;
    if (code === 'ENOENT') return undefined;
    throw new ModelFormatError(`${file} cannot be opened (${message}). Check its permissions.`, {
      subject: file,
      wanted: 'a readable file',
      cause,
    });
  }
  const facts = await handle.stat();
  if (facts.isFile()) return handle;
  await handle.close();
  const given = facts.isDirectory() ? 'a directory' : facts.isFIFO() ? 'a FIFO' : 'a device or socket';
  throw new ModelFormatError(`${file} is ${given}; wanted a regular file. Fetch it again.`, {
    subject: file,
    given,
    wanted: 'a regular file',
  });
}

/** Reads `length` bytes from `position` on, or as many as the file has. */
export async function readBytes(handle: FileHandle, position: number, length: number): Promise<Uint8Array> {
  const bytes = new Uint8Array(length);
  let filled = 0;
  while (filled < length) {
    const { bytesRead } = await handle.read(bytes, filled, length - filled, position + filled);
    if (bytesRead === 0) break;
    filled += bytesRead;
  }
  return bytes.subarray(0, filled);
}
