import { ModelFormatError } from '../errors.js';
import { openFile, readBytes } from './open-file.js';

/** Far more than any model's config, index or template has. */
const mostTextBytes = 32 * 2 ** 20;
/** JSON of deeper nesting overflows the stack of what walks it. */
const mostDepth = 64;
/** A value takes some 100 bytes of heap: two million are 200 MB, and ten times what the largest index has. */
const mostValues = 2 ** 21;
const shownCharacters = 200;

/** Whether a value is a plain JSON object. */
export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** The beginning of a text that came from a file, for messages. */
export function excerpt(text: string): string {
  return text.length <= shownCharacters ? text : `${text.slice(0, shownCharacters)}…`;
}

/** A value that came from a file, for messages. */
export function describeValue(value: unknown): string {
  return value === undefined ? 'nothing' : excerpt(JSON.stringify(value));
}

/** JSON text, parsed, and the keys of its outermost object as they are spelled: JSON.parse keeps the last of two. */
export interface ParsedJson {
  readonly value: unknown;
  readonly outerKeys: readonly string[];
}

/** Parses JSON text that came from `file`. @throws ModelFormatError when it is not JSON, or too deep or too much. */
export function parseJson(file: string, text: string): ParsedJson {
  const outerKeys = findOuterKeys(file, text);
  try {
    return { value: JSON.parse(text) as unknown, outerKeys };
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new ModelFormatError(`${file} is not valid JSON (${reason}). Fetch the file again.`, {
      subject: file,
      wanted: 'JSON',
      cause,
    });
  }
}

/** Walks JSON text once, before it is parsed: what it would take must be known first. */
function findOuterKeys(file: string, text: string): string[] {
  const keys: string[] = [];
  const beforeColon = /[ \t\r\n]*:/y;
  let depth = 0;
  let values = 1;
  for (let at = 0; at < text.length; at += 1) {
    const character = text[at];
    if (character === '"') {
      const start = at;
      at = endOfString(text, start);
      beforeColon.lastIndex = at + 1;
      if (depth === 1 && beforeColon.test(text)) keys.push(text.slice(start, at + 1));
    } else if (character === '{' || character === '[') {
      depth += 1;
      values += 1;
      if (depth > mostDepth) tooMuch(file, `JSON nested ${depth} deep`, `at most ${mostDepth} levels`);
    } else if (character === '}' || character === ']') {
      depth -= 1;
    } else if (character === ',') {
      values += 1;
    }
    if (values > mostValues) tooMuch(file, `JSON of more than ${mostValues} values`, `at most ${mostValues}`);
  }
  return keys;
}

/** The place of the quote that closes the string that begins at `start`. */
function endOfString(text: string, start: number): number {
  for (let at = start + 1; ; at += 1) {
    at = text.indexOf('"', at);
    if (at === -1) return text.length;
    let backslashes = 0;
    while (text[at - 1 - backslashes] === '\\') backslashes += 1;
    if (backslashes % 2 === 0) return at;
  }
}

function tooMuch(file: string, given: string, wanted: string): never {
  throw new ModelFormatError(
    `${file}: given ${given}, wanted ${wanted}. No model needs this; fetch the file again, from a source you trust.`,
    { subject: file, given, wanted },
  );
}

/** Reads a JSON file. @throws ModelFormatError when it is missing, unreadable, too large or not JSON. */
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
  return text === undefined ? undefined : parseJson(file, text).value;
}

/** Reads a text file that a model directory may lack: undefined when it does. */
export async function readOptionalText(file: string): Promise<string | undefined> {
  const handle = await openFile(file);
  if (handle === undefined) return undefined;
  try {
    const { size } = await handle.stat();
    if (size > mostTextBytes) tooMuch(file, `${size} bytes`, `at most ${mostTextBytes}`);
    return new TextDecoder().decode(await readBytes(handle, 0, size));
  } finally {
    await handle.close();
  }
}
