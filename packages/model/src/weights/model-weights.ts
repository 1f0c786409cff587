import type { Device, FloatDType, MappedFile, TensorHandle } from '@kv/sparse-core';

import type { ModelConfig } from '../config/model-config.js';
import type { StoredTensor } from '../safetensors/header.js';
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

export interface LayerWeights {
  readonly inputNorm: Vector;
  readonly query: LinearWeights;
  readonly key: LinearWeights;
  readonly value: LinearWeights;
  readonly queryNorm: Vector | undefined;
  readonly keyNorm: Vector | undefined;
  readonly output: LinearWeights;
  readonly postAttentionNorm: Vector;
  readonly gate: LinearWeights;
  readonly up: LinearWeights;
  readonly down: LinearWeights;
}

/** A model's weights, mapped from its files: they take memory only as far as they are used. */
export class ModelWeights implements Disposable {
  readonly embedding: Matrix;
  readonly layers: readonly LayerWeights[];
  readonly finalNorm: Vector;
  /** The embedding itself where the head is tied. */
  readonly head: Matrix;
  readonly #owned: readonly Disposable[];

  private constructor(config: ModelConfig, tensors: WeightTensors, files: readonly MappedFile[]) {
    this.embedding = tensors.matrix('model.embed_tokens.weight');
    this.finalNorm = tensors.norm('model.norm');
    this.head = config.tiedHead ? this.embedding : tensors.matrix('lm_head.weight');
    this.layers = Array.from({ length: config.layers }, (_, layer) => layerWeights(tensors, layer));
    // The tensors too: one that lies misaligned in its file is a copy.
    this.#owned = [...tensors.tensors, ...files];
  }

  /**
   * Opens the weights of a model directory.
   * @throws ModelFormatError when a file is missing or malformed, or contradicts the config
   */
  static async open(device: Device, directory: string, config: ModelConfig): Promise<ModelWeights> {
    const stored = await readStoredTensors(directory);
    checkWeights(config, stored);
    const paths = [...new Set([...stored.values()].map(({ file }) => file))];
    const files = await Promise.all(paths.map((path) => device.mapFile(path)));
    const byPath = new Map(files.map((file) => [file.path, file]));
    return new ModelWeights(config, new WeightTensors(stored, byPath), files);
  }

  /** Unmaps the files once the work that is already enqueued is done. */
  dispose(): void {
    for (const owned of this.#owned) owned[Symbol.dispose]();
  }

  [Symbol.dispose](): void {
    this.dispose();
  }
}

/** Finds tensors by the names of the model's files. `checkWeights` has seen that the required ones exist. */
class WeightTensors {
  /** All that were asked for. */
  readonly tensors: TensorHandle[] = [];
  readonly #stored: ReadonlyMap<string, StoredTensor>;
  readonly #files: ReadonlyMap<string, MappedFile>;

  constructor(stored: ReadonlyMap<string, StoredTensor>, files: ReadonlyMap<string, MappedFile>) {
    this.#stored = stored;
    this.#files = files;
  }

  matrix(name: string): Matrix {
    const { file, dtype, shape, byteOffset } = this.#find(name);
    return this.#keep(file.tensor(dtype, ['out', 'in'], [shape[0] ?? 0, shape[1] ?? 0], byteOffset));
  }

  vector<const Name extends string>(name: string, axis: Name): TensorHandle<FloatDType, readonly [Name]> {
    const { file, dtype, shape, byteOffset } = this.#find(name);
    return this.#keep(file.tensor(dtype, [axis], [shape[0] ?? 0], byteOffset));
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

  #keep<Kind extends TensorHandle>(tensor: Kind): Kind {
    this.tensors.push(tensor);
    return tensor;
  }

  #find(name: string): { file: MappedFile; dtype: FloatDType; shape: readonly number[]; byteOffset: number } {
    const tensor = this.#stored.get(name);
    const file = this.#files.get(tensor?.file ?? '');
    if (tensor === undefined || file === undefined) throw new Error(`tensor '${name}' was not checked`);
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
    query: tensors.linear(`${prefix}.self_attn.q_proj`),
    key: tensors.linear(`${prefix}.self_attn.k_proj`),
    value: tensors.linear(`${prefix}.self_attn.v_proj`),
    queryNorm: tensors.optionalNorm(`${prefix}.self_attn.q_norm`),
    keyNorm: tensors.optionalNorm(`${prefix}.self_attn.k_norm`),
    output: tensors.linear(`${prefix}.self_attn.o_proj`),
    postAttentionNorm: tensors.norm(`${prefix}.post_attention_layernorm`),
    gate: tensors.linear(`${prefix}.mlp.gate_proj`),
    up: tensors.linear(`${prefix}.mlp.up_proj`),
    down: tensors.linear(`${prefix}.mlp.down_proj`),
  };
}
