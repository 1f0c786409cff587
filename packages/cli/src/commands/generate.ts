import type { Tokenizer } from '@kv/model';
import { InvalidValueError } from '@kv/sparse-core';
import type { KvBytes, PrefillReport, SampleSettings } from '@kv/sparse-core';

import type { CommandContext } from '../command-context.js';
import { encodePrompt } from '../encode-prompt.js';
import type { Prompt } from '../encode-prompt.js';
import { formatBytes, formatCount, formatRate, formatSeconds, formatShare } from '../format.js';
import { measureAnswer } from '../measure-answer.js';
import type { MeasuredAnswer } from '../measure-answer.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { openPolicy } from '@kv/policies';
import { PrefillBar } from '../prefill-bar.js';
import { readTextFile } from '../read-text-file.js';

export interface GenerateTextOptions extends DeviceChoice {
  readonly prompt?: string | undefined;
  readonly promptFile?: string | undefined;
  readonly chat?: boolean | undefined;
  readonly policy: string;
  readonly maxNewTokens: number;
  readonly stop?: readonly string[] | undefined;
  readonly temperature: number;
  readonly topK?: number | undefined;
  readonly topP?: number | undefined;
  readonly minP?: number | undefined;
  readonly repetitionPenalty?: number | undefined;
  readonly seed?: number | undefined;
}

/**
 * `kv generate`: answers a prompt, text to stdout as it comes, timing to stderr.
 * @throws KvError of any class for a bad option, model or prompt; the signal's reason when interrupted
 */
export async function generateText(
  directory: string,
  options: GenerateTextOptions,
  { stdout, stderr, signal }: CommandContext,
): Promise<void> {
  const text = await readPromptText(options, signal);
  using model = await openModel(directory, options);
  const { maxNewTokens } = options;
  const given = await asPrompt(text, model.tokenizer, options, signal);
  const prompt = await encodePrompt(model, given, maxNewTokens, signal);
  const contextTokens = prompt.ids.length + maxNewTokens;
  using opened = await openPolicy(options.policy, model, { contextTokens });
  using runner = model.createRunner({ policy: opened.policy, contextTokens });
  using bar = new PrefillBar(stderr, options.policy);
  let report: PrefillReport | undefined;
  const answer = await measureAnswer(runner, model.tokenizer, prompt.ids, {
    maxTokens: maxNewTokens,
    stop: options.stop ?? [],
    sampling: readSampling(options),
    signal,
    onProgress({ tokens, total }) {
      bar.update(tokens, total);
      if (tokens === total) bar.dispose();
    },
    onReport: (reported) => void (report = reported),
    onText: (piece) => stdout.writeResult(piece),
  });
  stdout.write('\n');
  stderr.write(describe(answer, prompt.seconds, report));
}

async function readPromptText({ prompt, promptFile }: GenerateTextOptions, signal: AbortSignal): Promise<string> {
  if (promptFile !== undefined) return readTextFile('prompt', promptFile, signal);
  if (prompt !== undefined) return prompt;
  throw new InvalidValueError('No prompt was given; give --prompt TEXT or --prompt-file FILE.', { subject: 'prompt' });
}

async function asPrompt(
  text: string,
  tokenizer: Tokenizer,
  { chat = false }: GenerateTextOptions,
  signal: AbortSignal,
): Promise<Prompt> {
  const name = 'The prompt';
  if (!chat) return { name, text };
  // A template writes the special tokens itself.
  return { name, text: await tokenizer.renderChat([{ role: 'user', content: text }], { signal }), addSpecialTokens: false };
}

function readSampling({
  temperature,
  topK,
  topP,
  minP,
  repetitionPenalty,
  seed,
}: GenerateTextOptions): SampleSettings {
  const chosen = { temperature, topK, topP, minP, repetitionPenalty, seed };
  return Object.fromEntries(Object.entries(chosen).filter(([, value]) => value !== undefined));
}

function describe(answer: MeasuredAnswer, encodingSeconds: number, report: PrefillReport | undefined): string {
  const { decodeTokensPerSecond: rate } = answer;
  const decode = rate === undefined ? '' : ` at ${formatRate(rate)}/s`;
  return (
    `\nprompt: ${formatCount(answer.promptTokens)} tokens at ` +
    `${formatRate(answer.prefillTokensPerSecond)}/s, ` +
    `first token after ${formatSeconds(encodingSeconds + answer.firstTokenSeconds)}\n` +
    describeAttention(report) +
    `answer: ${formatCount(answer.answerTokens)} tokens${decode}; KV cache ${describeBytes(answer.kvBytes)}\n`
  );
}

function describeBytes({ device, host }: KvBytes): string {
  if (host === 0) return formatBytes(device);
  return `${formatBytes(device)} on the device, ${formatBytes(host)} on the host`;
}

/** Nothing for a policy that reads all prompts densely. */
function describeAttention(report: PrefillReport | undefined): string {
  const { density = 1, fallback } = report ?? {};
  if (density === 1 && fallback === undefined) return '';
  const why = fallback === undefined ? '' : `; ${density === 1 ? 'all' : 'some of it'} because ${fallback}`;
  return `attention: ${formatShare(density)} of the prompt's was computed${why}\n`;
}
