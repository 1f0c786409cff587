import { readFile } from 'node:fs/promises';
import { promisify } from 'node:util';
import { gunzip } from 'node:zlib';

import { InvalidValueError } from '@kv/sparse-core';
import { expectThat } from '@kv/sparse-core/native';
import { z } from 'zod';

/**
 * Reads a gzipped file of one JSON object a line.
 * @throws InvalidValueError for a file that cannot be read, or a line that is not of the wanted form
 */
export async function readJsonLines<Row>(file: string, schema: z.ZodType<Row>): Promise<Row[]> {
  const isPath = typeof file === 'string' && file !== '' && !file.includes('\0');
  expectThat('read', 'file', file, isPath, 'the path of a gzipped file of JSON lines');
  const text = await readText(file).catch((cause: unknown) => {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidValueError(`${file} cannot be read (${reason}). Give a gzipped file of JSON lines.`, {
      subject: file,
      cause,
    });
  });
  return text
    .trimEnd()
    .split('\n')
    .map((line, index) => {
      const parsed = schema.safeParse(parseJson(line));
      if (parsed.success) return parsed.data;
      throw new InvalidValueError(`${file}, line ${index + 1}: ${z.prettifyError(parsed.error)}`, {
        subject: file,
        given: line.slice(0, 200),
      });
    });
}

async function readText(file: string): Promise<string> {
  return (await promisify(gunzip)(await readFile(file))).toString('utf8');
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
