import { lstat } from 'node:fs/promises';
import { join } from 'node:path';

import { createDevice, ModelFormatError } from '@kv/sparse-core';
import type { Device } from '@kv/sparse-core';

import { readModelConfig } from './config/read-model-config.js';
import type { ModelConfig } from './config/model-config.js';
import { Runner } from './runner/runner.js';
import type { RunnerOptions } from './runner/runner.js';
import { Tokenizer } from './tokenizer/tokenizer.js';
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
  readonly #directory: string;
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
    this.#directory = directory;
    this.#tokenizer = tokenizer;
  }

  /** @throws ModelFormatError when the directory has none: such a model takes and gives token ids */
  get tokenizer(): Tokenizer {
    if (this.#tokenizer !== null) return this.#tokenizer;
    throw new ModelFormatError(
      `${this.#directory} has no tokenizer.json. Put it there, or use generateTokens() with token ids.`,
      { subject: 'tokenizer.json', given: 'no such file', wanted: 'tokenizer.json' },
    );
  }

  /**
   * Opens a Hugging Face directory: config.json, safetensors and, for text, tokenizer.json. The weights are
   * mapped, not read, so that a model larger than the free memory opens too.
   * @throws ModelFormatError when a file is missing, malformed, or contradicts another
   * @throws CapabilityError when the model is of a kind that the runner does not know
   */
  static async open(directory: string, { device = createDevice() }: ModelOptions = {}): Promise<Model> {
    const config = await readModelConfig(directory);
    const tokenizer = (await isThere(join(directory, 'tokenizer.json'))) ? await Tokenizer.open(directory) : null;
    try {
      const weights = await ModelWeights.open(device, directory, config);
      return new Model(device, config, weights, directory, tokenizer);
    } catch (error) {
      tokenizer?.dispose();
      throw error;
    }
  }

  /**
   * A runner of this model, with a cache of its own.
   * @throws OutOfMemoryError when cache and working memory do not fit; InvalidValueError
   */
  createRunner(options: RunnerOptions = {}): Runner {
    return new Runner(this, options);
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

/** Whether a directory has such an entry, be it a link that leads nowhere. */
async function isThere(path: string): Promise<boolean> {
  return await lstat(path).then(
    () => true,
    () => false,
  );
}
