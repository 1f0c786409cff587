import { CapabilityError, InvalidValueError, type Stream } from '@kv/sparse-core';
import { expectObject, expectThat, listOf } from '@kv/sparse-core/native';

import { expectWholeNumber } from '../expect-whole-number.js';
import { expectDeviceIds, isOnDevice } from './given-ids.js';
import type { LayerRunner } from './layer-runner.js';
import { countTokens, phases } from './batch-entry.js';
import type { BatchEntry } from './batch-entry.js';
import type { RunnerModel } from './runner-model.js';
import type { Sequence } from './sequence.js';

/** What of a runner its entries are checked against. */
interface EntryLimits {
  readonly model: RunnerModel;
  readonly stream: Stream;
  readonly maxBatchRows: number;
  readonly contextTokens: number;
  readonly deterministic: boolean;
  /** The ids, copied. @throws InvalidValueError, CapabilityError unless they can come behind the sequence. */
  checkTokens(sequence: Sequence, ids: ArrayLike<number>): Int32Array;
}

/**
 * The entries with ids of their own, which nobody else changes.
 * @param expectOwn throws for a sequence that is not the runner's
 */
export function checkEntries(
  operation: string,
  given: readonly BatchEntry[],
  runner: EntryLimits,
  expectOwn: (sequence: Sequence) => void,
): BatchEntry[] {
  const entries = listOf(operation, 'entries', given, runner.maxBatchRows).map((entry): BatchEntry => {
    expectObject(operation, 'entries', entry);
    const { sequence, ids, phase } = entry;
    expectThat(operation, 'phase', phase, phases.includes(phase), phases.join(', '));
    expectOwn(sequence);
    if (!isOnDevice(ids)) return { sequence, ids: runner.checkTokens(sequence, ids), phase };
    // They are checked on the device: one outside the vocabulary gives its own row NaN.
    expectDeviceIds(operation, ids, runner.stream);
    expectRoom(runner, sequence.length, ids.shape[0]);
    return { sequence, ids, phase };
  });
  const answers = entries.filter(({ phase }) => phase === 'decode').length;
  const areApart = (answers === 0 && entries.length === 1) || (answers === entries.length && operation === 'step');
  const wanted = 'one prompt, or for step() answers alone, since the runner is deterministic';
  expectThat(operation, 'entries', entries.length, areApart || !runner.deterministic, wanted);
  const counts = entries.map(countTokens);
  entries.forEach(({ phase }, index) => {
    if (phase === 'decode') expectWholeNumber('tokens of a decode entry', counts[index] ?? 0, 1, 1);
  });
  const rows = counts.reduce((sum, count) => sum + count, 0);
  // A prompt alone goes through each layer in chunks.
  if (entries.length !== 1) expectWholeNumber('rows of a batch of several, which maxBatchRows limits', rows, 1, runner.maxBatchRows);
  if (entries.some(({ phase }) => phase !== 'decode')) runner.model.weights.assertUnchanged();
  return entries;
}

/**
 * @param earlier what a sequence holds
 * @param spare how many others are to come behind them
 * @throws InvalidValueError unless `tokens` more fit the runner's context
 * @throws CapabilityError when the sequence would outgrow the model's sliding window
 */
export function expectRoom({ contextTokens, model }: EntryLimits, earlier: number, tokens: number, spare = 0): void {
  expectWholeNumber('tokens to add', tokens, 1, Number.MAX_SAFE_INTEGER);
  expectWholeNumber('tokens to answer', spare, 0, Number.MAX_SAFE_INTEGER);
  const length = earlier + tokens + spare;
  if (length > contextTokens) {
    throw new InvalidValueError(
      `contextTokens is ${contextTokens}, and ${tokens} tokens were given behind ${earlier} of the sequence` +
        `${spare === 0 ? '' : `, with ${spare} to answer`}. Give fewer, or make the runner with a larger contextTokens.`,
      { subject: 'contextTokens', given: length, wanted: contextTokens },
    );
  }
  const { slidingWindow } = model.config;
  if (slidingWindow === null || length <= slidingWindow) return;
  throw new CapabilityError(
    `The sequence would have ${length} tokens, and this model's sliding window is ${slidingWindow}. ` +
      'The runner has no sliding-window attention: keep prompt and answer within the window.',
    { subject: 'sliding_window', given: length, wanted: slidingWindow },
  );
}

/** @throws CapabilityError when it is not known what the cache would hold of the first tokens alone */
export function expectPrefix(layers: readonly LayerRunner[], sequence: Sequence, tokens: number): void {
  const { slot, length, promptEnd } = sequence;
  if (tokens >= promptEnd || layers.every(({ store }) => store.lengths(slot).every((held) => held === length))) return;
  throw new CapabilityError(
    `The fork would have ${tokens} tokens, and the cache holds a selection of the first ${promptEnd}. ` +
      `Fork ${promptEnd} or more, or read the text again.`,
    { subject: 'tokens', given: tokens, wanted: promptEnd },
  );
}
