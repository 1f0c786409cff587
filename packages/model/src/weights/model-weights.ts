import { DisposedError, ModelFormatError } from '@kv/sparse-core';
import type { Device, FloatDType, MappedFile, TensorHandle } from '@kv/sparse-core';
import type { StoredTensor } from '@kv/sparse-core/native';

import type { ModelConfig } from '../config/model-config.js';
import { readStoredTensors } from '../safetensors/weight-files.js';
import { checkWeights } from './check-weights.js';

export type Matrix = TensorHandle<FloatDType, readonly ['out', 'in']>;
export type Bias = TensorHandle<FloatDType, readonly ['out']>;
export type Vector = TensorHandle<FloatDType, readonly ['feature']>;

/** `output = input · weightᵀ + bias`. */
export interface LinearWeights {
  readonly weight: Matrix;
  readonly bias: Bias | undefined;
}

/**
 * A layer's weights, as its directory has them. With `x` the rows that enter it and `norm` the RMSNorm:
 *
 *     x += output(attention(query(norm(x)), key(norm(x)), value(norm(x))))
 *     x += down(silu(gate(norm(x))) * up(norm(x)))
 */
export interface LayerWeights {
  /** Of the norm ahead of attention. */
  readonly inputNorm: Vector;
  readonly query: LinearWeights;
  readonly key: LinearWeights;
  readonly value: LinearWeights;
  /** Of the norm of each query head before RoPE, `[headDim]`, in models that have one (Qwen3). */
  readonly queryNorm: Vector | undefined;
  /** The same of each key head. */
  readonly keyNorm: Vector | undefined;
  readonly output: LinearWeights;
  /** Of the norm ahead of `gate` and `up`. */
  readonly postAttentionNorm: Vector;
  readonly gate: LinearWeights;
  readonly up: LinearWeights;
  readonly down: LinearWeights;
}

/**
 * A model's weights. On the CPU they are mapped from its files and take memory only as far as they are used; a device
 * with memory of its own gets copies, and the files are unmapped once these are made.
 */
export class ModelWeights implements Disposable {
  readonly embedding: Matrix;
  readonly layers: readonly LayerWeights[];
  readonly finalNorm: Vector;
  /** The embedding itself where the head is tied. */
  readonly head: Matrix;
  readonly #tensors: WeightTensors;
  #disposed = false;

  private constructor(config: ModelConfig, tensors: WeightTensors, layers: readonly LayerWeights[]) {
    this.#tensors = tensors;
    this.embedding = tensors.matrix('model.embed_tokens.weight');
    this.finalNorm = tensors.norm('model.norm');
    this.head = config.tiedHead ? this.embedding : tensors.matrix('lm_head.weight');
    this.layers = layers;
  }

  /**
   * Opens the weights of a model directory.
   * @throws ModelFormatError when a file is missing or malformed, or contradicts the config
   */
  static async open(device: Device, directory: string, config: ModelConfig): Promise<ModelWeights> {
    const stored = await readStoredTensors(directory);
    checkWeights(config, stored);
    const tensors = new WeightTensors(device, stored);
    try {
      await tensors.mapFiles();
      const layers: LayerWeights[] = [];
      while (layers.length < config.layers) {
        layers.push(layerWeights(tensors, layers.length));
        await tensors.settle();
      }
      const weights = new ModelWeights(config, tensors, layers);
      if (device.kind !== 'cpu') tensors.unmapFiles();
      return weights;
    } catch (error) {
      tensors.dispose();
      throw error;
    }
  }

  /** @throws DisposedError when their memory was given back */
  assertHeld(): void {
    if (this.#disposed) throw new DisposedError('The model was disposed; open it again, and dispose it behind its runners.', { subject: 'model' });
  }

  /**
   * Whether the files that weights are mapped from are as they were: some microseconds. Copies on a device have none.
   * @throws ModelFormatError when one was truncated, extended or written to; DisposedError
   */
  assertUnchanged(): void {
    this.assertHeld();
    this.#tensors.assertUnchanged();
  }

  /** Gives the weights' memory back, and unmaps files, once the work that is already enqueued is done. */
  dispose(): void {
    this.#disposed = true;
    this.#tensors.dispose();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

/** Finds tensors by the names of the model's files. `checkWeights` has seen that the required ones exist. */
class WeightTensors {
  readonly #device: Device;
  readonly #stored: ReadonlyMap<string, StoredTensor>;
  readonly #files = new Map<string, MappedFile>();
  readonly #owned: Disposable[] = [];

  constructor(device: Device, stored: ReadonlyMap<string, StoredTensor>) {
    this.#device = device;
    this.#stored = stored;
  }

  async mapFiles(): Promise<void> {
    for (const path of new Set([...this.#stored.values()].map(({ file }) => file))) {
      this.#files.set(path, this.#own(await this.#device.mapFile(path)));
    }
  }

  /** Once the copies that are enqueued are done. */
  unmapFiles(): void {
    for (const file of this.#files.values()) file.dispose();
    this.#files.clear();
  }

  /** What was joined gives its parts' memory back before more is taken. */
  async settle(): Promise<void> {
    if (this.#device.kind !== 'cpu') await this.#device.defaultStream.synchronize();
  }

  assertUnchanged(): void {
    for (const file of this.#files.values()) file.assertUnchanged();
  }

  dispose(): void {
    for (const owned of this.#owned) owned[Symbol.dispose]();
    this.#files.clear();
  }

  matrix(name: string): Matrix {
    const { file, dtype, shape, byteOffset } = this.#find(name);
    return this.#own(file.tensor(dtype, ['out', 'in'], [shape[0] ?? 0, shape[1] ?? 0], byteOffset));
  }

  vector<const Name extends string>(name: string, axis: Name): TensorHandle<FloatDType, readonly [Name]> {
    const { file, dtype, shape, byteOffset } = this.#find(name);
    return this.#own(file.tensor(dtype, [axis], [shape[0] ?? 0], byteOffset));
  }

  norm(name: string): Vector {
    return this.vector(`${name}.weight`, 'feature');
  }

  optionalNorm(name: string): Vector | undefined {
    return this.#stored.has(`${name}.weight`) ? this.norm(name) : undefined;
  }

  linear(name: string): LinearWeights {
    const bias = `${name}.bias`;
    return {
      weight: this.matrix(`${name}.weight`),
      bias: this.#stored.has(bias) ? this.vector(bias, 'out') : undefined,
    };
  }

  /**
   * Layers of one input. A device with memory of its own has them one behind the other, and so multiplies many rows by all
   * of them at once.
   */
  projections(prefix: string): Pick<LayerWeights, 'query' | 'key' | 'value'> {
    const linear = (name: string): LinearWeights => this.linear(`${prefix}.${name}`);
    const [query, key, value] = [linear('q_proj'), linear('k_proj'), linear('v_proj')];
    const [queryWeight, keyWeight, valueWeight] = this.#joined(query.weight, key.weight, value.weight);
    const [queryBias, keyBias, valueBias] = this.#joined(query.bias, key.bias, value.bias);
    return {
      query: { weight: queryWeight, bias: queryBias },
      key: { weight: keyWeight, bias: keyBias },
      value: { weight: valueWeight, bias: valueBias },
    };
  }

  /** Copies in one piece of memory, where all are there and of one dtype. */
  #joined<Part extends Matrix | Bias | undefined>(...parts: [Part, Part, Part]): readonly [Part, Part, Part] {
    const [first] = parts;
    if (this.#device.kind === 'cpu' || first === undefined || parts.some((part) => part?.dtype !== first.dtype)) return parts;
    const sources = parts as readonly Matrix[];
    const extents = sources.map(({ shape }) => shape[0]);
    const [, ...others] = first.shape;
    const end = (part: number): number => extents.slice(0, part + 1).reduce((sum, extent) => sum + extent, 0);
    const all = this.#own(this.#device.tensor(first.dtype, first.axes as Matrix['axes'], [end(2), ...others] as never));
    this.#device.defaultStream.copy(sources, all);
    for (const source of sources) source.dispose();
    const slice = (part: number): Part => all.slice('out', end(part - 1), end(part)) as unknown as Part;
    return [slice(0), slice(1), slice(2)];
  }

  /** Tensors too are disposed: one that lies misaligned in its file is a copy. */
  #own<Kind extends Disposable>(owned: Kind): Kind {
    this.#owned.push(owned);
    return owned;
  }

  #find(name: string): { file: MappedFile; dtype: FloatDType; shape: readonly number[]; byteOffset: number } {
    const tensor = this.#stored.get(name);
    const file = this.#files.get(tensor?.file ?? '');
    if (tensor === undefined || file === undefined) {
      throw new ModelFormatError(`the weights lack tensor '${name}'.`, { subject: name });
    }
    return {
      file,
      dtype: tensor.dtype.toLowerCase() as FloatDType,
      shape: tensor.shape,
      byteOffset: tensor.byteOffset,
    };
  }
}

function layerWeights(tensors: WeightTensors, layer: number): LayerWeights {
  const prefix = `model.layers.${layer}`;
  return {
    inputNorm: tensors.norm(`${prefix}.input_layernorm`),
    ...tensors.projections(`${prefix}.self_attn`),
    queryNorm: tensors.optionalNorm(`${prefix}.self_attn.q_norm`),
    keyNorm: tensors.optionalNorm(`${prefix}.self_attn.k_norm`),
    output: tensors.linear(`${prefix}.self_attn.o_proj`),
    postAttentionNorm: tensors.norm(`${prefix}.post_attention_layernorm`),
    gate: tensors.linear(`${prefix}.mlp.gate_proj`),
    up: tensors.linear(`${prefix}.mlp.up_proj`),
    down: tensors.linear(`${prefix}.mlp.down_proj`),
  };
}
