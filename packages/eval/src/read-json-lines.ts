import { readFile } from 'node:fs/promises';
import { promisify } from 'node:util';
import { gunzip } from 'node:zlib';

import { InvalidValueError } from '@kv/sparse-core';
import { z } from 'zod';

/**
 * Reads a gzipped file of one JSON object a line.
 * @throws InvalidValueError for a line that is not of the wanted form; what `readFile` throws
 */
export async function readJsonLines<Row>(file: string, schema: z.ZodType<Row>): Promise<Row[]> {
  const text = (await promisify(gunzip)(await readFile(file))).toString('utf8');
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

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
