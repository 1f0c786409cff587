import { constants } from 'node:fs';
import { access, stat, writeFile } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';

import { InvalidValueError } from '@kv/sparse-core';

/**
 * What takes long has a place for its result: that is found out before.
 * @throws InvalidValueError
 */
export async function expectWritableFile(file: string, subject: string): Promise<void> {
  const refuse = (reason: string, cause?: unknown): never => {
    throw new InvalidValueError(`--${subject}: ${file === '' ? 'an empty path' : file} cannot be written: ${reason}. Give another path.`, { subject, given: file, cause });
  };
  if (file === '') refuse('it names no file');
  const found = await stat(file).catch(() => undefined);
  if (found?.isDirectory() === true) refuse('it is a folder');
  const folder = dirname(resolve(file));
  await access(folder, constants.W_OK).catch((cause: unknown) => refuse(`${folder} is no folder that you may write to`, cause));
}

/** @throws InvalidValueError when the disk is full, say */
export async function writeTextFile(file: string, subject: string, text: string): Promise<void> {
  await writeFile(file, text).catch((cause: unknown) => {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidValueError(`--${subject}: ${file} cannot be written (${reason}). Make room, or give another path.`, { subject, given: file, cause });
  });
}
