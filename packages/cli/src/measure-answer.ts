import { generate } from '@kv/model';
import type { GenerateOptions, Runner, Tokenizer } from '@kv/model';

/** An answer and what it took. */
export interface MeasuredAnswer {
  readonly text: string;
  readonly promptTokens: number;
  readonly answerTokens: number;
  /** From the call, tokenising included, to the first token of the answer. */
  readonly firstTokenSeconds: number;
  readonly prefillTokensPerSecond: number;
  /** Undefined for an answer of one token, which is all prefill. */
  readonly decodeTokensPerSecond: number | undefined;
  /** What the cache held at the end of the answer, on device and host. */
  readonly kvBytes: number;
}

export interface Prompt {
  readonly text: string;
  /** Whether the tokenizer adds what a model wants around a text. */
  readonly addSpecialTokens: boolean;
}

export interface MeasureOptions extends GenerateOptions {
  /** Called with every piece of the answer as it comes. */
  readonly onText?: (text: string) => void;
}

/**
 * Answers a prompt and measures it.
 * @throws what `generate` throws
 */
export async function measureAnswer(
  runner: Runner,
  tokenizer: Tokenizer,
  prompt: Prompt,
  { onText, ...options }: MeasureOptions,
): Promise<MeasuredAnswer> {
  const started = performance.now();
  const { signal } = options;
  const ids = await tokenizer.encode(prompt.text, {
    addSpecialTokens: prompt.addSpecialTokens,
    ...(signal && { signal }),
  });
  let text = '';
  let answerTokens = 0;
  let firstTokenSeconds = 0;
  let prefillSeconds = 0;
  let decodeSeconds = 0;
  let kvBytes = 0;
  for await (const token of generate(runner, tokenizer, ids, options)) {
    if (answerTokens === 0) {
      firstTokenSeconds = (performance.now() - started) / 1000;
      prefillSeconds = token.milliseconds / 1000;
    } else {
      decodeSeconds += token.milliseconds / 1000;
    }
    answerTokens += 1;
    text += token.text;
    onText?.(token.text);
    // The cache is returned when the answer ends.
    const { device, host } = runner.kvBytes;
    kvBytes = device + host;
  }
  return {
    text,
    promptTokens: ids.length,
    answerTokens,
    firstTokenSeconds,
    prefillTokensPerSecond: ids.length / prefillSeconds,
    decodeTokensPerSecond: answerTokens > 1 ? (answerTokens - 1) / decodeSeconds : undefined,
    kvBytes,
  };
}
