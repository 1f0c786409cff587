import { expectWholeNumber } from '../expect-whole-number.js';
import type { Logits, Runner } from '../runner/runner.js';
import type { Sequence } from '../runner/sequence.js';

/** How far the reading of a prompt is. */
export interface PrefillProgress {
  readonly tokens: number;
  readonly total: number;
}

export interface PrefillOptions {
  /** Tokens of one step. Default: the runner's largest batch. */
  readonly chunkTokens?: number;
  readonly signal?: AbortSignal;
  /** Called after each chunk. */
  readonly onProgress?: (progress: PrefillProgress) => void;
}

/**
 * Reads a prompt into a sequence, chunk by chunk.
 * @returns the logits behind its last token, f32 `[1, vocabulary]`, which the caller disposes
 * @throws InvalidValueError for an empty or over-long prompt, or ids outside the vocabulary
 * @throws the signal's reason when it is aborted between chunks; the sequence is then to be disposed
 */
export async function prefill(
  runner: Runner,
  sequence: Sequence,
  prompt: ArrayLike<number>,
  { chunkTokens = runner.maxBatchRows, signal, onProgress }: PrefillOptions = {},
): Promise<Logits> {
  expectWholeNumber('chunkTokens', chunkTokens, 1, runner.maxBatchRows);
  runner.checkTokens(sequence, prompt);
  const ids = Int32Array.from(prompt);
  const total = ids.length;
  let earlier: Promise<void> | undefined;
  for (let start = 0; ; start += chunkTokens) {
    signal?.throwIfAborted();
    const end = Math.min(start + chunkTokens, total);
    const logits = await step(runner, sequence, ids.subarray(start, end), end === total);
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
      onProgress?.({ tokens: total, total });
      return logits;
    } catch (error) {
      logits?.dispose();
      throw error;
    }
  }
}

async function step(
  runner: Runner,
  sequence: Sequence,
  ids: Int32Array,
  isLast: boolean,
): Promise<Logits | undefined> {
  using batch = runner.createBatch([{ sequence, ids, phase: isLast ? 'prefill-end' : 'prefill' }]);
  runner.embed(batch);
  await runner.runLayers(batch, 0, runner.model.config.layers);
  return isLast ? runner.head(batch) : undefined;
}
