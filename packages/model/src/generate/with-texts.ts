import { expectThat } from '@kv/sparse-core/native';

import { Tokenizer } from '../tokenizer/tokenizer.js';
import type { FinishReason, GeneratedId } from './generate-tokens.js';
import { StopMatcher } from './stop-matcher.js';

/** One more token of an answer. */
export interface GeneratedToken {
  readonly id: number;
  /**
   * The text that the token completes: possibly none, where a character or a stop string is not decided yet.
   */
  readonly text: string;
  /** Since the token before, or for the first one since the call. */
  readonly milliseconds: number;
  /** Set on the last token. */
  readonly finishReason: FinishReason | null;
}

/**
 * The texts of an answer's tokens as they come. A stop string ends it, and whoever gives the tokens is told so.
 * @param prompt whose last tokens decide how the answer's first are written
 * @throws InvalidValueError; what `tokens` throws
 */
export async function* withTexts(
  tokenizer: Tokenizer,
  prompt: ArrayLike<number>,
  tokens: AsyncIterable<GeneratedId>,
  matcher: StopMatcher = new StopMatcher([]),
): AsyncGenerator<GeneratedToken, void> {
  expectThat('withTexts', 'tokenizer', tokenizer, Tokenizer.is(tokenizer), 'the tokenizer of a model');
  expectThat('withTexts', 'matcher', matcher, matcher instanceof StopMatcher, 'a StopMatcher');
  const decoder = tokenizer.stream(prompt);
  for await (const { id, milliseconds, finishReason } of tokens) {
    let text = matcher.push(decoder.push(id));
    if (finishReason !== null) text += matcher.push(decoder.end()) + matcher.end();
    yield { id, text, milliseconds, finishReason: matcher.stopped ? 'stop' : finishReason };
    if (matcher.stopped) return;
  }
}
