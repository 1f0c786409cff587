import type { PrefillReport } from '@kv/sparse-core';
import { expectBoolean, expectCallback, expectOptions, expectSignal, type OptionNames } from '@kv/sparse-core/native';

import { expectRunner } from '../expect-runner.js';
import { expectWholeNumber } from '../expect-whole-number.js';
import type { Logits } from '../runner/head.js';
import { type BatchEntry, countTokens } from '../runner/batch-entry.js';
import type { Runner } from '../runner/runner.js';
import type { Sequence } from '../runner/sequence.js';
import { type ChunkReport, meanReport } from './mean-report.js';

/** How far the reading of a prompt is. */
export interface PrefillProgress {
  readonly tokens: number;
  readonly total: number;
}

export interface PrefillOptions {
  /** Tokens of one step. Default: the runner's largest batch. */
  readonly chunkTokens?: number | undefined;
  /**
   * Whether the prompt ends with these tokens, which is when a policy drops what it does not keep. Default: true.
   * False leaves the cache as it is: for a text that is forked or continued, and for what follows a selection.
   */
  readonly endsPrompt?: boolean | undefined;
  readonly signal?: AbortSignal | undefined;
  /** Called after each chunk. */
  readonly onProgress?: ((progress: PrefillProgress) => void) | undefined;
  /**
   * Called with what the prefill attention did, the mean over layers and chunks, as soon as all of them have reported. That
   * may be after the logits are there: reading never waits for a report. Not called when it is cut off, or a report fails.
   * What it throws ends the sequence: `sequence.failure` is it, and the cause of what its next call throws.
   */
  readonly onReport?: ((report: PrefillReport) => void) | undefined;
}

export const prefillOptions: OptionNames<PrefillOptions> = { chunkTokens: true, endsPrompt: true, signal: true, onProgress: true, onReport: true };

/**
 * @param names those that are options, of a prompt and of what follows it
 * @throws InvalidValueError unless they are options, but for `chunkTokens`, which the runner limits
 */
export function expectPrefillOptions<Options extends PrefillOptions>(operation: string, options: Options, names: OptionNames<Options>): void {
  expectOptions(operation, options, names);
  const { endsPrompt = true, signal, onProgress, onReport } = options;
  expectBoolean(operation, 'endsPrompt', endsPrompt);
  expectSignal(operation, signal);
  expectCallback(operation, 'onProgress', onProgress);
  expectCallback(operation, 'onReport', onReport);
}

/**
 * Reads a prompt, or more of one, into a sequence, chunk by chunk.
 * @returns the logits behind its last token, f32 `[1, vocabulary]`, which the caller disposes
 * @throws InvalidValueError for an empty or over-long prompt, or ids outside the vocabulary
 * @throws the signal's reason when it is aborted between chunks; the sequence then holds what was read
 * @throws what ended the sequence, such as a selection that is not in order
 */
export async function prefill(
  runner: Runner,
  sequence: Sequence,
  prompt: ArrayLike<number>,
  options: PrefillOptions = {},
): Promise<Logits> {
  expectRunner('prefill', runner);
  expectPrefillOptions('prefill', options, prefillOptions);
  const { chunkTokens = runner.maxBatchRows, endsPrompt = true, signal, onProgress, onReport } = options;
  expectWholeNumber('chunkTokens', chunkTokens, 1, runner.maxBatchRows);
  const ids = runner.checkTokens(sequence, prompt);
  const total = ids.length;
  const reports: ChunkReport[] = [];
  let earlier: Promise<void> | undefined;
  const step = async (entry: BatchEntry, isLast: boolean): Promise<Logits | undefined> => {
    using batch = runner.createBatch([entry]);
    runner.embed(batch);
    await runner.runLayers(batch, 0, runner.model.config.layers);
    const rows = countTokens(entry);
    const scores = rows * (sequence.length - (rows - 1) / 2);
    reports.push(...batch.reports.map((report) => ({ report, scores })));
    return isLast ? runner.head(batch) : undefined;
  };
  for (let start = 0; ; start += chunkTokens) {
    signal?.throwIfAborted();
    const end = Math.min(start + chunkTokens, total);
    const isLast = end === total;
    const phase = isLast && endsPrompt ? 'prefill-end' : 'prefill';
    const logits = await step({ sequence, ids: ids.subarray(start, end), phase }, isLast);
    try {
      // One chunk is enqueued behind the one that computes, so that the device never waits for this thread.
      const computed = runner.stream.synchronize();
      // A failure shows when it is awaited, and at every later wait.
      computed.catch(() => undefined);
      await earlier;
      if (start > 0) onProgress?.({ tokens: start, total });
      earlier = computed;
      if (logits === undefined) continue;
      await computed;
      if (sequence.failure) throw sequence.failure;
      onProgress?.({ tokens: total, total });
      if (onReport) {
        meanReport(reports)
          .then(onReport, () => undefined)
          .catch((error: unknown) => {
            sequence.fail(error);
          });
      }
      return logits;
    } catch (error) {
      logits?.dispose();
      throw error;
    }
  }
}
