import { InvalidValueError } from '@kv/sparse-core';
import { z } from 'zod';

import { parseJson } from '../parse-json.js';
import { readTextFile } from '../read-text-file.js';

const questionSchema = z.object({ question: z.string().min(1), answer: z.string().optional() });
const questionsSchema = z.array(questionSchema).min(1);

/** Thousands of questions, in bytes; what JSON of more may take is too much. */
const longestList = 2 ** 20;

/** Something to ask about a document. */
export interface Question {
  readonly question: string;
  /** The right answer, where it is known. */
  readonly answer?: string | undefined;
}

/**
 * Reads a JSON list of questions.
 * @throws InvalidValueError when the file is missing or is no such list
 */
export async function readQuestions(file: string, signal: AbortSignal): Promise<readonly Question[]> {
  const parsed = questionsSchema.safeParse(parseJson(await readTextFile('list of questions', file, signal, longestList)));
  if (parsed.success) return parsed.data;
  throw new InvalidValueError(
    `${file} is no list of questions; wanted JSON like [{ "question": "…", "answer": "…" }], answers optional.`,
    { subject: 'questions', given: file, wanted: '[{ question, answer }]', cause: parsed.error },
  );
}

/** Whether an answer is the wanted one, but for spaces around it and a full stop behind it. */
export function isRight(given: string, wanted: string): boolean {
  return bare(given) === bare(wanted);
}

/** An answer without spaces around it and a full stop behind it. */
export function bare(answer: string): string {
  return answer.trim().replace(/\.$/, '');
}
