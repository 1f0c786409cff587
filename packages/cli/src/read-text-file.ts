import { readFile } from 'node:fs/promises';

import { InvalidValueError } from '@kv/sparse-core';

/**
 * The text of a file, which must hold some.
 * @param what what the file is to the user, for messages: 'document'
 * @throws InvalidValueError when it is missing, unreadable, empty or not UTF-8
 */
export async function readTextFile(what: string, file: string): Promise<string> {
  const bytes = await readFile(file).catch((cause: unknown) => {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidValueError(`The ${what} ${file} cannot be read (${reason}). Check the path.`, {
      subject: what,
      given: file,
      cause,
    });
  });
  const text = decode(what, file, bytes);
  if (text.trim() === '') {
    throw new InvalidValueError(`The ${what} ${file} is empty; give one with text in it.`, {
      subject: what,
      given: file,
    });
  }
  return text;
}

function decode(what: string, file: string, bytes: Uint8Array): string {
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(bytes);
  } catch (cause) {
    throw new InvalidValueError(`The ${what} ${file} is not UTF-8 text; convert it first.`, {
      subject: what,
      given: file,
      wanted: 'UTF-8',
      cause,
    });
  }
}
