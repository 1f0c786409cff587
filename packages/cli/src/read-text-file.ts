import { createReadStream } from 'node:fs';

import { InvalidValueError } from '@kv/sparse-core';

import { formatBytes } from './format.js';

/** More than the context of any model holds. */
const longestText = 64 * 2 ** 20;

/**
 * The text of a file, which must hold some. It may be a pipe.
 * @param what what the file is to the user, for messages: 'document'
 * @param mostBytes bytes past which it is refused
 * @throws InvalidValueError when it is missing, unreadable, empty, too long or not UTF-8; the signal's reason
 */
export async function readTextFile(
  what: string,
  file: string,
  signal: AbortSignal,
  mostBytes = longestText,
): Promise<string> {
  const bytes = await readBytes(file, mostBytes, signal).catch((cause: unknown) => {
    signal.throwIfAborted();
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidValueError(`The ${what} ${file} cannot be read (${reason}). Check the path.`, {
      subject: what,
      given: file,
      cause,
    });
  });
  if (bytes.length > mostBytes) {
    throw new InvalidValueError(`The ${what} ${file} has more than ${formatBytes(mostBytes)}; give a shorter one.`, {
      subject: what,
      given: file,
      wanted: mostBytes,
    });
  }
  const text = decode(what, file, bytes);
  if (text.trim() === '') {
    throw new InvalidValueError(`The ${what} ${file} is empty; give one with text in it.`, {
      subject: what,
      given: file,
    });
  }
  return text;
}

/** A device has no end, so what is too long is read no further. */
async function readBytes(file: string, mostBytes: number, signal: AbortSignal): Promise<Uint8Array> {
  const chunks: Buffer[] = [];
  for await (const chunk of createReadStream(file, { end: mostBytes, signal })) chunks.push(chunk as Buffer);
  return Buffer.concat(chunks);
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
