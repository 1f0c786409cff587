import { lstat } from 'node:fs/promises';
import { dirname, join } from 'node:path';

import { createDevice, type Device, ModelFormatError } from '@kv/sparse-core';
import { expectOptions, expectThat, isDevice } from '@kv/sparse-core/native';

import { readModelConfig } from './config/read-model-config.js';
import type { ModelConfig } from './config/model-config.js';
import { expectPath } from './expect-directory.js';
import { Runner } from './runner/runner.js';
import type { RunnerOptions } from './runner/runner-options.js';
import { Tokenizer } from './tokenizer/tokenizer.js';
import { fingerprint } from './weights/fingerprint.js';
import { ModelWeights } from './weights/model-weights.js';

export interface ModelOptions {
  /** Where the model runs. Default: a CPU device of its own. */
  readonly device?: Device | undefined;
}

/** A model directory, opened: config, tokenizer, and weights mapped from their files. */
export class Model implements Disposable {
  readonly device: Device;
  readonly config: ModelConfig;
  readonly weights: ModelWeights;
  readonly directory: string;
  readonly #tokenizer: Tokenizer | null;

  private constructor(
    device: Device,
    config: ModelConfig,
    weights: ModelWeights,
    directory: string,
    tokenizer: Tokenizer | null,
  ) {
    this.device = device;
    this.config = config;
    this.weights = weights;
    this.directory = directory;
    this.#tokenizer = tokenizer;
  }

  /** @throws ModelFormatError when the directory has none: such a model takes and gives token ids */
  get tokenizer(): Tokenizer {
    if (this.#tokenizer !== null) return this.#tokenizer;
    throw new ModelFormatError(
      `${this.directory} has no tokenizer.json. Put it there, or use generateTokens() with token ids.`,
      { subject: 'tokenizer.json', given: 'no such file', wanted: 'tokenizer.json' },
    );
  }

  /**
   * Opens a Hugging Face directory: config.json, safetensors and, for text, tokenizer.json. The weights are
   * mapped, not read, so that a model larger than the free memory opens too.
   * @throws ModelFormatError when a file is missing, malformed, or contradicts another
   * @throws CapabilityError when the model is of a kind that the runner does not know
   */
  static async open(directory: string, options: ModelOptions = {}): Promise<Model> {
    expectPath(directory);
    expectOptions('Model.open', options, { device: true });
    const { device = createDevice() } = options;
    expectThat('Model.open', 'device', device, isDevice(device), 'a device of createDevice()');
    // The tokenizer's process starts while config and weights are read.
    const [network, tokenizer] = await Promise.allSettled([
      openNetwork(device, directory),
      openTokenizer(join(directory, 'tokenizer.json')),
    ]);
    if (network.status === 'fulfilled' && tokenizer.status === 'fulfilled') {
      const { config, weights } = network.value;
      return new Model(device, config, weights, directory, tokenizer.value);
    }
    if (network.status === 'fulfilled') network.value.weights.dispose();
    if (tokenizer.status === 'fulfilled') tokenizer.value?.dispose();
    throw [network, tokenizer].find((opened) => opened.status === 'rejected')?.reason;
  }

  /**
   * A runner of this model, with a cache of its own.
   * @throws OutOfMemoryError when cache and working memory do not fit; InvalidValueError
   */
  createRunner(options: RunnerOptions = {}): Runner {
    return new Runner(this, options);
  }

  /**
   * 64 hexadecimal digits that tell this model from others, for what is made for one model alone, such as codebooks: a
   * hash of how its keys are rotated, and of the beginning of each tensor. Copies of a model have the same one.
   * @throws ModelFormatError when the files are gone or changed their form
   */
  fingerprint(): Promise<string> {
    return fingerprint(this.directory, this.config);
  }

  /** Unmaps the weights. Dispose the runners first. */
  dispose(): void {
    this.weights.dispose();
    this.#tokenizer?.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

async function openNetwork(
  device: Device,
  directory: string,
): Promise<{ readonly config: ModelConfig; readonly weights: ModelWeights }> {
  const config = await readModelConfig(directory);
  return { config, weights: await ModelWeights.open(device, directory, config) };
}

/** null where the directory has no tokenizer.json, not even a link that leads nowhere. */
async function openTokenizer(file: string): Promise<Tokenizer | null> {
  const isThere = await lstat(file).then(
    () => true,
    () => false,
  );
  return isThere ? await Tokenizer.open(dirname(file)) : null;
}
