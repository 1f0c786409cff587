import { readFile } from 'node:fs/promises';

import { ModelFormatError } from '@kv/sparse-core';

/** Whether a value is a plain JSON object. */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Parses JSON text that came from `file`. @throws ModelFormatError when it is not JSON. */
export function parseJson(file: string, text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new ModelFormatError(`${file} is not valid JSON (${reason}). Fetch the file again.`, {
      subject: file,
      wanted: 'JSON',
      cause,
    });
  }
}

/** Reads a JSON file. @throws ModelFormatError when it is missing, unreadable or not JSON. */
export async function readJson(file: string): Promise<unknown> {
  const value = await readOptionalJson(file);
  if (value === undefined) {
    throw new ModelFormatError(
      `${file} does not exist. A model directory needs it; fetch the whole directory again.`,
      { subject: file, given: 'no such file', wanted: 'a JSON file' },
    );
  }
  return value;
}

/** Reads a JSON file that a model directory may lack: undefined when it does. */
export async function readOptionalJson(file: string): Promise<unknown> {
  const text = await readOptionalText(file);
  return text === undefined ? undefined : parseJson(file, text);
}

/** Reads a text file that a model directory may lack: undefined when it does. */
export async function readOptionalText(file: string): Promise<string | undefined> {
  try {
    return await readFile(file, 'utf8');
  } catch (cause) {
    if ((cause as NodeJS.ErrnoException).code === 'ENOENT') return undefined;
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new ModelFormatError(`${file} cannot be read (${reason}). Check its permissions.`, {
      subject: file,
      cause,
    });
  }
}
