import { InvalidValueError } from '@kv/sparse-core';
import { excerpt, expectThat } from '@kv/sparse-core/native';
import { z } from 'zod';

import type { RequestSize } from '../scheduler/request.js';
import { Random } from './random.js';
import type { SimulatedModel } from './systems.js';

/** A request, and when it comes. */
export interface TracedRequest extends RequestSize {
  readonly milliseconds: number;
}

/**
 * Kinds of requests after ten tasks of LongBench: words or Chinese characters of a prompt, as LongBench counts them, and how
 * many tokens it lets answers have. All come equally often, with lengths that are lognormal about these.
 */
const kinds = [
  { prompt: 18_409, of: 'word', answer: 128 }, // NarrativeQA
  { prompt: 15_768, of: 'character', answer: 128 }, // DuReader
  { prompt: 15_380, of: 'character', answer: 512 }, // VCSum
  { prompt: 10_614, of: 'word', answer: 512 }, // QMSum
  { prompt: 8734, of: 'word', answer: 512 }, // GovReport
  { prompt: 4559, of: 'word', answer: 64 }, // MultiFieldQA
  { prompt: 4206, of: 'word', answer: 64 }, // RepoBench-P
  { prompt: 3619, of: 'word', answer: 128 }, // Qasper
  { prompt: 2113, of: 'word', answer: 512 }, // MultiNews
  { prompt: 1235, of: 'word', answer: 64 }, // LCC
] as const;
const spread = 0.45;
const leastTokens = 64;

/** How long answers are: all so many tokens, or as long as LongBench lets those of each task be. */
export type AnswerTokens = number | 'longbench';

/** The same seed gives the same requests at every rate: only the time between them changes. */
export function poissonTrace(
  requests: number,
  perSecond: number,
  { contextTokens, tokensPer }: Pick<SimulatedModel, 'contextTokens' | 'tokensPer'>,
  seed: number,
  answerTokens: AnswerTokens = 'longbench',
): TracedRequest[] {
  const random = new Random(seed);
  let milliseconds = 0;
  return Array.from({ length: requests }, () => {
    milliseconds += (1000 * random.exponential()) / perSecond;
    const kind = kinds[random.below(kinds.length)] ?? kinds[0];
    const [prompt, answer] = [kind.prompt * tokensPer[kind.of], kind.answer].map((mean) => mean * Math.exp(spread * random.normal() - spread ** 2 / 2));
    const maxTokens = answerTokens === 'longbench' ? Math.max(2, Math.round(answer ?? 0)) : answerTokens;
    const most = contextTokens - maxTokens;
    return { milliseconds, maxTokens, promptTokens: Math.min(most, Math.max(leastTokens, Math.round(prompt ?? 0))) };
  });
}

const line = z.object({
  timestamp: z.number().nonnegative(),
  input_length: z.number().int().positive(),
  output_length: z.number().int().positive(),
  hash_ids: z.array(z.number().int()).optional(),
});

/**
 * Requests of a trace as Mooncake publishes them: a JSON object a line, with `timestamp` in milliseconds, `input_length` and
 * `output_length` in tokens, and `hash_ids`, which are checked and not used.
 * @throws InvalidValueError that names the line, for what is none, or when time runs backwards
 */
export function readTrace(text: string): TracedRequest[] {
  expectThat('readTrace', 'text', text, typeof text === 'string', 'a text');
  let last = 0;
  const requests = text.split('\n').flatMap((content, index): TracedRequest[] => {
    if (content.trim() === '') return [];
    const { timestamp, input_length: promptTokens, output_length: maxTokens } = readLine(content, index + 1);
    if (timestamp < last) fail(index + 1, `timestamp is ${timestamp} and follows ${last}; lines are in order of time`, content);
    last = timestamp;
    return [{ milliseconds: timestamp, promptTokens, maxTokens }];
  });
  if (requests.length === 0) throw new InvalidValueError('The trace has no requests.', { subject: 'trace' });
  return requests;
}

function readLine(content: string, number: number): z.infer<typeof line> {
  let parsed: unknown;
  try {
    parsed = JSON.parse(content);
  } catch {
    return fail(number, 'it is no JSON, like {"timestamp": 0, "input_length": 3000, "output_length": 5}', content);
  }
  const { data, error } = line.safeParse(parsed);
  if (data) return data;
  const [issue] = error.issues;
  return fail(number, [issue?.path.join('.'), issue?.message].filter(Boolean).join(': '), content);
}

function fail(number: number, why: string, content: string): never {
  throw new InvalidValueError(`Line ${number} of the trace: ${why}. Given: ${excerpt(content)}`, { subject: `line ${number}` });
}
