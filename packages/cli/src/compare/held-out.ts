import { access } from 'node:fs/promises';
import { join } from 'node:path';

import { InvalidValueError } from '@kv/sparse-core';
import { z } from 'zod';

import { parseJson } from '../parse-json.js';
import { readTextFile } from '../read-text-file.js';

const momentSchema = z.enum(['question-aware', 'question-agnostic']);
const shareSchema = z.object({
  policy: z.string(),
  moment: momentSchema.optional(),
  right: z.number().min(0).max(100),
  examples: z.number().int().positive(),
});
const heldOutSchema = z.object({ tokens: z.array(z.number().int().positive()).min(1), shares: z.array(shareSchema) });

/** How many of held-out examples a model answers right under each policy, in %, as it was measured. */
export type HeldOut = z.infer<typeof heldOutSchema>;

/** Beside the weights that were measured. */
const fileName = join('eval', 'right-answers.json');

const longestFile = 2 ** 20;

/**
 * What was measured of a model; undefined where nothing was.
 * @throws InvalidValueError when its file holds something else
 */
export async function readHeldOut(directory: string, signal: AbortSignal): Promise<HeldOut | undefined> {
  const file = join(directory, fileName);
  const isThere = await access(file).then(
    () => true,
    () => false,
  );
  if (!isThere) return undefined;
  const text = await readTextFile('list of right answers', file, signal, longestFile);
  const parsed = heldOutSchema.safeParse(parseJson(text));
  if (parsed.success) return parsed.data;
  throw new InvalidValueError(
    `${file} is no list of shares of right answers; make it anew with tools/bench/report.mjs, or remove it.`,
    { subject: 'held-out', given: file, wanted: '{ tokens, shares: [{ policy, moment, right, examples }] }', cause: parsed.error },
  );
}
