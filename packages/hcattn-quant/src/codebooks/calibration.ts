import { createDevice, type Device, type FloatDType, InvalidValueError, type KvCapacity, type KvLayer, type KvStoreFactory } from '@kv/sparse-core';
import type { Tensor } from '@kv/sparse-core';
import { densePagedStores, type DensePagedStore, expectBoolean, expectCallback, expectOptions, expectSignal, expectThat, isDevice } from '@kv/sparse-core/native';
import { blockTokens } from '../quantized-blocks.js';
import { type Codebooks, expectFingerprint, expectSizes, type LayerCodebooks } from './codebooks.js';
import { expectEnoughKeys, trainLayer, type TrainingSettings } from './train-layer.js';

/** How far training is. */
export interface CalibrationProgress {
  /** That are done, of all layers. */
  readonly iterations: number;
  /** Iterations that there will be, of all layers. */
  readonly total: number;
}

export interface CalibrationOptions {
  /** `model.fingerprint()` of the model whose keys these are. */
  readonly model: string;
  /** Sub-vectors of a key, a divisor of its dims. Default: half the dims. */
  readonly groups?: number | undefined;
  /** Centroids of a codebook, 2 to 8192. Default: 8192. */
  readonly centroids?: number | undefined;
  /** Whether each group of a head has a codebook of its own. Default: false, all groups of a head share one. */
  readonly separate?: boolean | undefined;
  /** Whether each channel is first divided by its root mean square. Default: false. */
  readonly channelScale?: boolean | undefined;
  /** A whole number: the same seed and texts give the same bits. Default: 0. */
  readonly seed?: number | undefined;
  /** Of mini-batch k-means. Default: 200. */
  readonly iterations?: number | undefined;
  /** Vectors of a mini-batch. Default: 10,000. */
  readonly batchVectors?: number | undefined;
  /** The CPU device that trains. Default: that of the cache if it is one, else a new one. */
  readonly device?: Device | undefined;
  readonly signal?: AbortSignal | undefined;
  readonly onProgress?: ((progress: CalibrationProgress) => void) | undefined;
}

/**
 * A dense cache whose keys become codebooks:
 *
 *     const calibration = new Calibration();
 *     const runner = model.createRunner({ policy: kvPolicy({ store: calibration.store }), sequences: texts.length });
 *     for (const ids of texts) (await prefill(runner, runner.openSequence(), ids)).dispose();
 *     const codebooks = await calibration.train({ model: await model.fingerprint() });
 */
export class Calibration {
  /** For one runner at a time. What it reads stays in its cache until it is disposed. */
  readonly store: KvStoreFactory;
  #stores: readonly DensePagedStore[] = [];
  #slots = 0;

  constructor() {
    this.store = {
      name: 'dense',
      create: (layers: readonly KvLayer[], capacity: KvCapacity) => {
        const stores = densePagedStores(layers, capacity, { name: 'dense', dtype: undefined, blockTokens });
        this.#stores = stores;
        this.#slots = capacity.slots;
        return stores;
      },
    };
  }

  /**
   * Refuses what `train` would refuse of these options and of the number of tokens, before they are read.
   * @param tokens of all texts
   * @throws InvalidValueError for options out of range, groups that do not divide the head, fewer than 39 vectors for a
   *   centroid, or when no runner has the store
   */
  expectTrainable(options: CalibrationOptions, tokens: number): void {
    const settings = this.#settings(options);
    expectThat('calibration.train', 'tokens', tokens, Number.isSafeInteger(tokens) && tokens >= 0, 'a whole number from 0 on');
    expectEnoughKeys(tokens, settings);
  }

  /**
   * Trains codebooks on all keys that the cache holds, those of one layer at a time. Nothing of it runs on the JavaScript
   * thread, and the same keys and options give the same bits, whatever the number of threads.
   * @throws InvalidValueError for options out of range, groups that do not divide the head, fewer than 39 vectors for a
   *   centroid, or keys with a number that is not finite
   * @throws DisposedError when the runner was disposed; OutOfMemoryError; the signal's reason when it is aborted
   */
  async train(options: CalibrationOptions): Promise<Codebooks> {
    const settings = this.#settings(options);
    const { model, signal, onProgress } = options;
    const first = this.#firstStore();
    const { headDim } = first.layer;
    const keys = this.#tokens(first).reduce((sum, tokens) => sum + tokens, 0);
    expectEnoughKeys(keys, settings);
    const cache = first.denseBlocks().keys.device;
    const device = options.device ?? (cache.kind === 'cpu' ? cache : createDevice({ kind: 'cpu' }));
    const layers: LayerCodebooks[] = [];
    const total = this.#stores.length * settings.iterations;
    for (const [layer, store] of this.#stores.entries()) {
      signal?.throwIfAborted();
      const ofLayer = await this.#keysOf(store, device, keys);
      try {
        const done = layer * settings.iterations;
        const progress = { signal, onProgress: (iterations: number) => onProgress?.({ iterations: done + iterations, total }) };
        layers.push(await trainLayer(ofLayer, { ...settings, seed: settings.seed + layer }, progress));
      } finally {
        ofLayer.dispose();
      }
    }
    const { groups, books, centroids, seed, iterations, batchVectors } = settings;
    return { model, headDim, groups, books, centroids, layers, training: { seed, iterations, batchVectors, keys } };
  }

  #firstStore(): DensePagedStore {
    const [first] = this.#stores;
    if (first !== undefined) return first;
    throw new InvalidValueError('calibration.train: no runner has its store; read texts with one of that policy first.', {
      subject: 'store',
    });
  }

  #settings(options: CalibrationOptions): TrainingSettings {
    expectOptions('calibration.train', options, {
      ...{ model: true, groups: true, centroids: true, separate: true, channelScale: true },
      ...{ seed: true, iterations: true, batchVectors: true, device: true, signal: true, onProgress: true },
    });
    expectFingerprint('calibration.train', 'model', options.model);
    expectSignal('calibration.train', options.signal);
    expectCallback('calibration.train', 'onProgress', options.onProgress);
    return settingsOf(options, this.#firstStore().layer.headDim);
  }

  /** Tokens of each slot. */
  #tokens(store: DensePagedStore): number[] {
    return Array.from({ length: this.#slots }, (_, slot) => store.lengths(slot)[0] ?? 0);
  }

  /** The keys of a layer, text behind text, on the device that trains. */
  async #keysOf(store: DensePagedStore, device: Device, total: number): Promise<Tensor<FloatDType, readonly ['kvHead', 'token', 'dim']>> {
    const { kvHeads, headDim } = store.layer;
    const { keys, blockTable } = store.denseBlocks();
    const table = await blockTable.read();
    const width = blockTable.shape[2];
    const gathered = device.tensor(keys.dtype, ['kvHead', 'token', 'dim'], [kvHeads, total, headDim]);
    // The stream of the device that the cache is on reads there, in the order of its other work.
    const stream = keys.device.createStream();
    try {
      let first = 0;
      for (const [slot, tokens] of this.#tokens(store).entries()) {
        for (let kvHead = 0; kvHead < kvHeads; kvHead++) {
          const ofHead = gathered.slice('kvHead', kvHead, kvHead + 1);
          for (let token = 0; token < tokens; token += blockTokens) {
            const block = table[(slot * kvHeads + kvHead) * width + token / blockTokens] ?? 0;
            const count = Math.min(blockTokens, tokens - token);
            const source = keys.slice('block', block, block + 1).slice('blockToken', 0, count);
            stream.copy(source, ofHead.slice('token', first + token, first + token + count) as never);
          }
        }
        first += tokens;
      }
      await stream.synchronize();
      return gathered;
    } catch (error) {
      gathered.dispose();
      throw error;
    } finally {
      stream.dispose();
    }
  }
}

function settingsOf(options: CalibrationOptions, headDim: number): TrainingSettings {
  const { groups = headDim / 2, centroids = 8192, separate = false, channelScale = false } = options;
  const { seed = 0, iterations = 200, batchVectors = 10_000, device } = options;
  const expect = (name: string, given: unknown, holds: boolean, wanted: string) => {
    expectThat('calibration.train', name, given, holds, wanted);
  };
  expectSizes('calibration.train', { headDim, groups, centroids });
  expectBoolean('calibration.train', 'separate', separate);
  expectBoolean('calibration.train', 'channelScale', channelScale);
  const isCount = (given: unknown, most: number) => Number.isSafeInteger(given) && (given as number) > 0 && (given as number) <= most;
  expect('seed', seed, Number.isSafeInteger(seed) && seed >= 0 && seed < 2 ** 52, 'a whole number from 0 to 2^52 - 1');
  expect('iterations', iterations, isCount(iterations, mostSteps), `a whole number from 1 to ${mostSteps}`);
  expect('batchVectors', batchVectors, isCount(batchVectors, mostSteps), `a whole number from 1 to ${mostSteps}`);
  expect('device', device, device === undefined || (isDevice(device) && device.kind === 'cpu'), 'a CPU device of createDevice()');
  return { groups, books: separate ? groups : 1, centroids, channelScale, seed, iterations, batchVectors };
}

/** Iterations, and vectors of each: together below 2^31. */
const mostSteps = 30_000;
