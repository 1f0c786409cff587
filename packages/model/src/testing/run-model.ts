import { createDevice, densePagedStore, kvPolicy } from '@kv/sparse-core';
import type { DeviceKind, FloatDType } from '@kv/sparse-core';

import { Model } from '../model.js';
import type { BatchEntry } from '../runner/batch-entry.js';
import type { ModelBatch } from '../runner/model-batch.js';
import type { Runner } from '../runner/runner.js';
import type { RunnerOptions } from '../runner/runner-options.js';
import type { Sequence } from '../runner/sequence.js';

/** Opens a model and a runner of it, gives them to `use`, and disposes them. */
export async function withRunner<Result>(
  directory: string,
  options: RunnerOptions & { readonly cache?: FloatDType; readonly kind?: DeviceKind; readonly threads?: number },
  use: (runner: Runner, model: Model) => Promise<Result>,
): Promise<Result> {
  const { cache = 'f32', kind = 'cpu', threads = 2, activations = 'f32', ...runnerOptions } = options;
  using model = await Model.open(directory, { device: createDevice({ kind, threads }) });
  const policy = kvPolicy({ store: densePagedStore({ dtype: cache }) });
  using runner = model.createRunner({ policy, activations, ...runnerOptions });
  return await use(runner, model);
}

/** Runs all layers of a batch. */
export async function runBatch(runner: Runner, batch: ModelBatch): Promise<void> {
  runner.embed(batch);
  await runner.runLayers(batch, 0, runner.model.config.layers);
}

/** The logits of a step of answers, which the runner records. */
export async function recordedStep(runner: Runner, entries: readonly BatchEntry[]): Promise<Float32Array> {
  using logits = await runner.step(entries);
  return await logits.read();
}

/** The same step, operation by operation. */
export async function unrecordedStep(runner: Runner, entries: readonly BatchEntry[]): Promise<Float32Array> {
  using batch = runner.createBatch(entries);
  await runBatch(runner, batch);
  using logits = runner.head(batch);
  return await logits.read();
}

/** The logits behind every token, `[token, vocabulary]`, of a sequence that is read in chunks. */
export async function allLogits(
  runner: Runner,
  sequence: Sequence,
  ids: Int32Array,
  chunkTokens = ids.length,
): Promise<Float32Array> {
  const { vocabularySize } = runner.model.config;
  const logits = new Float32Array(ids.length * vocabularySize);
  for (let start = 0; start < ids.length; start += chunkTokens) {
    const chunk = ids.subarray(start, start + chunkTokens);
    const phase = start + chunkTokens < ids.length ? 'prefill' : 'prefill-end';
    using batch = runner.createBatch([{ sequence, ids: chunk, phase }]);
    await runBatch(runner, batch);
    using rows = runner.head(
      batch,
      Array.from(chunk, (_, row) => row),
    );
    logits.set(await rows.read(), start * vocabularySize);
  }
  return logits;
}
