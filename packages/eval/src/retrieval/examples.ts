import { InvalidValueError } from '@kv/sparse-core';
import type { Tokenizer } from '@kv/model';
import { expectObject, expectThat } from '@kv/sparse-core/native';
import { z } from 'zod';

import { expectCount, expectIds, expectTokenizer } from '../expect-given.js';
import { readJsonLines } from '../read-json-lines.js';

const exampleSchema = z.object({
  id: z.string(),
  task: z.string(),
  /** Tokens that the prompt was made for; it has a few fewer. */
  length: z.number().int().positive(),
  /** A document and, on its last line, the question. */
  prompt: z.string(),
  answer: z.string().min(1),
});

/** A prompt that hides facts and asks for some of them. */
export type RetrievalExample = z.infer<typeof exampleSchema>;

/** An example as token ids. */
export interface EncodedExample extends Pick<RetrievalExample, 'id' | 'task' | 'length'> {
  readonly prompt: Int32Array;
  /** How many of the prompt's tokens are the document; the others are the question. */
  readonly documentTokens: number;
  readonly answer: Int32Array;
}

/**
 * Reads examples of retrieval from a gzipped file of one JSON object a line: `id`, `task`, `length`, `prompt`,
 * `answer`.
 * @throws InvalidValueError for a file that cannot be read, or a line of another form
 */
export function readRetrievalExamples(file: string): Promise<RetrievalExample[]> {
  return readJsonLines(file, exampleSchema);
}

/**
 * Tokenizes an example. The question is the last line of the prompt; a token that spans the end of the line before
 * counts as the question's.
 * @throws InvalidValueError when the prompt's tokens are not the first ones of prompt and answer together, or when
 *   nothing stands before the question
 */
export async function encodeExample(
  tokenizer: Tokenizer,
  example: RetrievalExample,
): Promise<EncodedExample> {
  expectTokenizer('encodeExample', tokenizer);
  const { error } = exampleSchema.safeParse(example);
  const why = error === undefined ? '' : z.prettifyError(error);
  expectThat('encodeExample', 'example', example, error === undefined, `one of readRetrievalExamples(): ${why}`);
  const { id, task, length, prompt, answer } = example;
  const document = prompt.slice(0, prompt.lastIndexOf('\n') + 1);
  const all = await tokenizer.encode(prompt + answer);
  const promptIds = await tokenizer.encode(prompt);
  const documentIds = await tokenizer.encode(document);
  const documentTokens = commonPrefix(documentIds, promptIds);
  const wanted = commonPrefix(promptIds, all) === promptIds.length && documentTokens > 1;
  if (!wanted || documentTokens === promptIds.length || all.length === promptIds.length) {
    throw new InvalidValueError(
      `Example ${id} does not fall into a document, a question on the last line and an answer at token boundaries.`,
      { subject: id, given: { document: documentTokens, prompt: promptIds.length, all: all.length } },
    );
  }
  return { id, task, length, prompt: promptIds, documentTokens, answer: all.subarray(promptIds.length) };
}

/** @throws InvalidValueError unless it is one of `encodeExample` */
export function expectExample(operation: string, given: EncodedExample): void {
  expectObject(operation, 'example', given);
  const { prompt, answer, documentTokens } = given;
  expectIds(operation, 'prompt', prompt);
  expectIds(operation, 'answer', answer);
  const isPart = Number.isInteger(documentTokens) && documentTokens > 1 && documentTokens < prompt.length;
  expectThat(operation, 'documentTokens', documentTokens, isPart, `a whole number from 2 to ${prompt.length - 1}`);
  expectCount(operation, 'tokens of the answer', answer.length);
}

function commonPrefix(one: Int32Array, other: Int32Array): number {
  const end = one.findIndex((id, index) => id !== other[index]);
  return end === -1 ? one.length : end;
}
