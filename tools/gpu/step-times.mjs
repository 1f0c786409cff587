// Decode steps of many sequences, as an engine enqueues them.
import { sample } from '../../packages/sparse-core/dist/index.js';

/** Reads a prompt of arbitrary tokens into each sequence. Returns the milliseconds that each took. */
export async function readPrompts(runner, sequences, lengths) {
  const { vocabularySize } = runner.model.config;
  const times = [];
  for (const [index, sequence] of sequences.entries()) {
    const started = performance.now();
    const length = lengths[index];
    for (let first = 0; first < length; first += runner.maxBatchRows) {
      const rows = Math.min(runner.maxBatchRows, length - first);
      const ids = Int32Array.from({ length: rows }, (_, i) => ((first + i) * 7919 + index * 104729) % vocabularySize);
      const phase = first + rows === length ? 'prefill-end' : 'prefill';
      (await runner.step([{ sequence, ids, phase }])).dispose();
    }
    await runner.stream.synchronize();
    times.push(performance.now() - started);
  }
  return times;
}

/**
 * The milliseconds of steps of one token of each sequence, chosen on the device; each step is enqueued before the last one is
 * done. `before(step)` is called ahead of each. With `repeats` every step is fed the same tokens, so that it reads much the same.
 */
export async function timeSteps(runner, sequences, steps, { warmUp = 4, before = () => undefined, repeats = false } = {}) {
  const { device } = runner.model;
  const rows = sequences.length;
  const ids = device.tensor('i32', ['row'], [rows], Int32Array.from({ length: rows }, (_, i) => i + 2));
  const chosen = repeats ? device.tensor('i32', ['row'], [rows]) : ids;
  const idOf = sequences.map((_, index) => ids.slice('row', index, index + 1).view(['token'], [1]));
  const settings = sequences.map(() => ({ temperature: 0 }));
  const times = [];
  const ended = [];
  for (let step = 0; step < warmUp + steps; step += 1) {
    if (step >= warmUp) before(step - warmUp);
    const entries = sequences.map((sequence, index) => ({ sequence, ids: idOf[index], phase: 'decode' }));
    const logits = await runner.step(entries);
    sample(runner.stream, { logits, settings, steps: sequences.map(() => step), output: chosen });
    logits.dispose();
    ended.push(chosen.read().then(() => times.push(performance.now())));
    // One step ahead of the device, as an engine is.
    await ended[step - 1];
  }
  await Promise.all(ended);
  for (const tensor of new Set([ids, chosen])) tensor.dispose();
  return times.slice(warmUp).map((time, index) => time - times[warmUp + index - 1]);
}
