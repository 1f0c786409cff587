import { Calibration, saveCodebooks } from '@kv/hcattn-quant';
import { kvPolicy, type Model, prefill } from '@kv/model';

import type { CommandContext } from '../command-context.js';
import { formatBytes, formatCount } from '../format.js';
import { openModel } from '../open-model.js';
import type { DeviceChoice } from '../options.js';
import { PrefillBar } from '../prefill-bar.js';
import { readTextFile } from '../read-text-file.js';
import { expectWritableFile } from '../writable-file.js';

export interface CalibrateOptions extends DeviceChoice {
  readonly text: readonly string[];
  readonly out: string;
  readonly groups?: number | undefined;
  readonly centroids: number;
  readonly separate: boolean;
  readonly channelScale: boolean;
  readonly iterations: number;
  readonly seed: number;
}

/**
 * `kv calibrate`: reads texts with dense attention and trains codebooks on the keys, which it writes to a file.
 * @throws KvError of any class for a bad option, text or model; the signal's reason when interrupted
 */
export async function calibrate(directory: string, options: CalibrateOptions, { stdout, stderr, signal }: CommandContext): Promise<void> {
  await expectWritableFile(options.out, 'out');
  using model = await openModel(directory, options);
  const prompts = await readPrompts(model, options.text, signal);
  const total = prompts.reduce((sum, { length }) => sum + length, 0);
  const calibration = new Calibration();
  using runner = model.createRunner({
    policy: kvPolicy({ store: calibration.store }),
    sequences: prompts.length,
    contextTokens: Math.max(...prompts.map(({ length }) => length)),
    cacheTokens: total,
  });
  const { groups, centroids, separate, channelScale, iterations, seed } = options;
  const training = { model: await model.fingerprint(), groups, centroids, separate, channelScale, iterations, seed, signal };
  calibration.expectTrainable(training, total);
  {
    using bar = new PrefillBar(stderr, 'reads');
    let read = 0;
    for (const ids of prompts) {
      const before = read;
      const onProgress = ({ tokens }: { readonly tokens: number }) => bar.update(before + tokens, total);
      (await prefill(runner, runner.openSequence(), ids, { signal, onProgress })).dispose();
      read += ids.length;
    }
  }
  using bar = new PrefillBar(stderr, 'trains', 'iterations');
  const codebooks = await calibration.train({
    ...training,
    onProgress: ({ iterations: done, total: all }) => bar.update(done, all),
  });
  bar.dispose();
  await saveCodebooks(options.out, codebooks);
  const vectors = Math.floor((total * codebooks.groups) / codebooks.books / centroids);
  const bytes = codebooks.layers.reduce((sum, layer) => sum + layer.centroids.byteLength + layer.scale.byteLength, 0);
  stdout.write(
    `${options.out}: ${formatCount(codebooks.layers.length)} layers, ${formatCount(codebooks.groups)} groups of ${codebooks.headDim / codebooks.groups} dims, ` +
      `${formatCount(centroids)} centroids, trained on ${formatCount(total)} tokens: ${formatCount(vectors)} vectors for each centroid; ${formatBytes(bytes)}\n`,
  );
}

/** The texts as token ids, each no longer than the model's context: what is longer goes on in a text of its own. */
async function readPrompts({ tokenizer, config }: Model, files: readonly string[], signal: AbortSignal): Promise<Int32Array[]> {
  const prompts: Int32Array[] = [];
  for (const file of files) {
    const ids = await tokenizer.encode(await readTextFile('text', file, signal), { signal });
    for (let first = 0; first < ids.length; first += config.maxPositions) prompts.push(ids.subarray(first, first + config.maxPositions));
  }
  return prompts;
}
