import type { Model } from '@kv/model';
import { InvalidValueError } from '@kv/sparse-core';

import { formatCount } from './format.js';

export interface Prompt {
  /** What the prompt is to the user, for messages: 'The prompt', or the name of a file. */
  readonly name: string;
  readonly text: string;
  /** Whether the tokenizer adds what the model wants around a text. Default: it does. */
  readonly addSpecialTokens?: boolean | undefined;
}

export interface EncodedPrompt {
  readonly ids: Int32Array;
  /** What tokenizing took. */
  readonly seconds: number;
}

/**
 * Tokenizes a prompt.
 * @throws InvalidValueError when the model's context cannot hold it and an answer; it says by how much
 */
export async function encodePrompt(
  { config, tokenizer }: Model,
  { name, text, addSpecialTokens = true }: Prompt,
  maxNewTokens: number,
  signal: AbortSignal,
): Promise<EncodedPrompt> {
  const started = performance.now();
  const ids = await tokenizer.encode(text, { addSpecialTokens, signal });
  const seconds = (performance.now() - started) / 1000;
  const excess = ids.length + maxNewTokens - config.maxPositions;
  if (excess <= 0) return { ids, seconds };
  const characters = Math.ceil((excess * text.length) / ids.length);
  const shorten = `Shorten it by ${formatCount(excess)} tokens (about ${formatCount(characters)} characters), lower`;
  throw new InvalidValueError(
    `${name} has ${formatCount(ids.length)} tokens; the model's context of ${formatCount(config.maxPositions)} ` +
      `must hold them and an answer of ${formatCount(maxNewTokens)}. ` +
      `${excess < ids.length ? shorten : 'Lower'} --max-new-tokens, or use a model with a longer context.`,
    { subject: 'prompt', given: ids.length, wanted: config.maxPositions - maxNewTokens },
  );
}
