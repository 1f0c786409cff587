import { generate } from '@kv/model';
import type { GenerateOptions, Runner, Tokenizer } from '@kv/model';
import type { KvBytes } from '@kv/sparse-core';

/** An answer and what it took. */
export interface MeasuredAnswer {
  readonly text: string;
  readonly promptTokens: number;
  readonly answerTokens: number;
  /** To the first token of the answer; tokenizing is not included. */
  readonly firstTokenSeconds: number;
  readonly prefillTokensPerSecond: number;
  /** Undefined for an answer of one token, which is all prefill. */
  readonly decodeTokensPerSecond: number | undefined;
  /** What the cache held at the end of the answer. */
  readonly kvBytes: KvBytes;
}

export interface MeasureOptions extends GenerateOptions {
  /** Called with every piece of the answer as it comes. */
  readonly onText?: ((text: string) => void) | undefined;
}

/**
 * Answers a prompt and measures it.
 * @throws what `generate` throws
 */
export async function measureAnswer(
  runner: Runner,
  tokenizer: Tokenizer,
  prompt: Int32Array,
  { onText, ...options }: MeasureOptions,
): Promise<MeasuredAnswer> {
  let text = '';
  let answerTokens = 0;
  let prefillSeconds = 0;
  let decodeSeconds = 0;
  let kvBytes: KvBytes = { device: 0, host: 0 };
  for await (const token of generate(runner, tokenizer, prompt, options)) {
    if (answerTokens === 0) prefillSeconds = token.milliseconds / 1000;
    else decodeSeconds += token.milliseconds / 1000;
    answerTokens += 1;
    text += token.text;
    onText?.(token.text);
    // The cache is returned when the answer ends. Its blocks are counted once, not behind every token.
    if (token.finishReason === null) continue;
    kvBytes = options.sequence ? runner.kvBytesOf(options.sequence) : runner.kvBytes;
  }
  return {
    text,
    promptTokens: prompt.length,
    answerTokens,
    firstTokenSeconds: prefillSeconds,
    prefillTokensPerSecond: prompt.length / prefillSeconds,
    decodeTokensPerSecond: answerTokens > 1 ? (answerTokens - 1) / decodeSeconds : undefined,
    kvBytes,
  };
}
