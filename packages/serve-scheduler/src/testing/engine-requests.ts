import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

import type { GeneratedId } from '@kv/model';

import type { EngineRequestOptions } from '../engine/engine-request.js';

export const needleModel = fileURLToPath(new URL('../../../../models/needle-8m', import.meta.url));
const golden = JSON.parse(readFileSync(`${needleModel}/golden.json`, 'utf8')) as { prompts: { ids: number[] }[] };

/** Tokens of a text. */
export const text = golden.prompts.flatMap(({ ids }) => ids).slice(0, 4000);

/** The prompt of a request: a piece of the text, 40 to 189 tokens. */
export const promptOf = (index: number): number[] => text.slice(50 * index, 50 * index + 40 + ((index * 37) % 150));

/** Some greedy, some drawn. */
export const optionsOf = (index: number): EngineRequestOptions => ({
  maxTokens: 12 + (index % 9),
  sampling: index % 3 === 0 ? { temperature: 0.8, seed: index, repetitionPenalty: 1.1 } : { temperature: 0 },
});

export const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

export async function collect(answer: AsyncIterable<GeneratedId>): Promise<number[]> {
  const ids: number[] = [];
  for await (const { id } of answer) ids.push(id);
  return ids;
}
