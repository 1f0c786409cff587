import type { Logits, Runner } from '@kv/model';
import { prefill } from '@kv/model';
import { crossEntropy, InvalidValueError } from '@kv/sparse-core';
import type { KvSelector } from '@kv/sparse-core';
import { expectOptions, expectSignal, show } from '@kv/sparse-core/native';
import { z } from 'zod';

import { expectIds, expectRunner } from '../expect-given.js';
import { observing } from '../observing.js';
import { readJsonLines } from '../read-json-lines.js';

const textSchema = z.object({ text: z.string().min(1) });

/**
 * Reads texts from a gzipped file of one JSON object a line, each with a `text`.
 * @throws InvalidValueError for a file that cannot be read, or a line of another form
 */
export async function readTexts(file: string): Promise<string[]> {
  return (await readJsonLines(file, textSchema)).map(({ text }) => text);
}

/** How surprising a text's tokens were. */
export interface TextLoss {
  /** How many were counted. */
  readonly tokens: number;
  /** Mean of `−ln p` over the tokens, in nats. */
  readonly crossEntropy: number;
  /** `exp(crossEntropy)` */
  readonly perplexity: number;
}

export interface LossOptions {
  /**
   * Tokens that are read first and not counted, at least one. The selection drops tokens at their end, so that what
   * counts is how well the rest is predicted from what was kept. Default: 1, the beginning-of-text token.
   */
  readonly contextTokens?: number | undefined;
  /**
   * Tokens of a step behind the context; where what a token sees depends on its chunk, few are more like an answer.
   * Default: the runner's largest batch.
   */
  readonly chunkTokens?: number | undefined;
  /** Default: keeps everything. */
  readonly select?: KvSelector | undefined;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Reads a text and measures how likely each of its tokens was behind those before.
 * @throws InvalidValueError for a text that the context leaves nothing of, or that the runner has no room for
 * @throws the signal's reason when it is aborted between chunks
 */
export async function textLoss(
  runner: Runner,
  ids: Int32Array,
  options: LossOptions = {},
): Promise<TextLoss> {
  expectRunner('textLoss', runner);
  expectIds('textLoss', 'ids', ids);
  expectOptions('textLoss', options, { contextTokens: true, chunkTokens: true, select: true, signal: true });
  const { contextTokens = 1, chunkTokens = runner.maxBatchRows, select = observing(0), signal } = options;
  expectSignal('textLoss', signal);
  if (!Number.isInteger(contextTokens) || contextTokens < 1 || contextTokens >= ids.length) {
    throw new InvalidValueError(
      `contextTokens is ${show(contextTokens)}; it must be a whole number from 1 to ${ids.length - 1}, the text's last token.`,
      { subject: 'contextTokens', given: contextTokens, wanted: ids.length - 1 },
    );
  }
  if (!Number.isInteger(chunkTokens) || chunkTokens < 1 || chunkTokens > runner.maxBatchRows) {
    throw new InvalidValueError(
      `chunkTokens is ${show(chunkTokens)}; it must be a whole number from 1 to ${runner.maxBatchRows}, the runner's largest batch.`,
      { subject: 'chunkTokens', given: chunkTokens, wanted: runner.maxBatchRows },
    );
  }
  using sequence = runner.openSequence({ select });
  runner.checkTokens(sequence, ids);
  using first = await prefill(runner, sequence, ids.subarray(0, contextTokens), { signal });
  const losses = [...(await tokenLosses(runner, first, ids.subarray(contextTokens, contextTokens + 1)))];
  for (let start = contextTokens; start < ids.length - 1; start += chunkTokens) {
    signal?.throwIfAborted();
    const end = Math.min(start + chunkTokens, ids.length - 1);
    using batch = runner.createBatch([{ sequence, ids: ids.subarray(start, end), phase: 'prefill' }]);
    runner.embed(batch);
    await runner.runLayers(batch, 0, runner.model.config.layers);
    const rows = Array.from({ length: end - start }, (_, row) => row);
    using logits = runner.head(batch, rows);
    losses.push(...(await tokenLosses(runner, logits, ids.subarray(start + 1, end + 1))));
  }
  const mean = losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
  return { tokens: losses.length, crossEntropy: mean, perplexity: Math.exp(mean) };
}

async function tokenLosses({ stream }: Runner, logits: Logits, targets: Int32Array): Promise<Float32Array> {
  using output = stream.device.tensor('f32', ['row'], [targets.length]);
  crossEntropy(stream, { logits, targets, output });
  return await output.read();
}
