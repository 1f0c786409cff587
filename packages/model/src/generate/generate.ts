import { expectThat } from '@kv/sparse-core/native';

import { expectRunner } from '../expect-runner.js';
import type { Runner } from '../runner/runner.js';
import { Tokenizer } from '../tokenizer/tokenizer.js';
import { answerOptions, generateTokens } from './generate-tokens.js';
import type { GenerateTokensOptions } from './generate-tokens.js';
import { expectPrefillOptions } from './prefill.js';
import { StopMatcher } from './stop-matcher.js';
import { type GeneratedToken, withTexts } from './with-texts.js';

export interface GenerateOptions extends GenerateTokensOptions {
  /** Texts that end the answer; they are not part of it. */
  readonly stop?: readonly string[] | undefined;
}

/**
 * Answers a prompt, token by token. The texts, taken together, are the answer.
 * @param prompt a text, tokenized with the special tokens that the model wants, or token ids
 * @throws InvalidValueError for an empty or over-long prompt, or an empty stop string
 * @throws the signal's reason when it is aborted
 */
export async function* generate(
  runner: Runner,
  tokenizer: Tokenizer,
  prompt: string | ArrayLike<number>,
  options: GenerateOptions = {},
): AsyncGenerator<GeneratedToken, void> {
  expectRunner('generate', runner);
  expectThat('generate', 'tokenizer', tokenizer, Tokenizer.is(tokenizer), 'the tokenizer of a model');
  expectPrefillOptions('generate', options, { ...answerOptions, stop: true });
  const { stop = [], ...others } = options;
  const { signal, sequence = 'new' } = others;
  // A text that is empty would end every answer at once.
  const matcher = new StopMatcher(stop);
  const ids = typeof prompt === 'string' ? await tokenizer.encode(prompt, { signal }) : runner.checkTokens(sequence, prompt);
  yield* withTexts(tokenizer, ids, generateTokens(runner, ids, others), matcher);
}
