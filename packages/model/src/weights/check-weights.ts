import { ModelFormatError } from '@kv/sparse-core';
import { excerpt, type StoredTensor } from '@kv/sparse-core/native';

import type { ModelConfig } from '../config/model-config.js';
import { layerShapes, outerShapes } from './weight-shapes.js';
import type { WeightShapes } from './weight-shapes.js';

const weightDTypes = ['F32', 'F16', 'BF16'];

/**
 * Holds a model's tensors against its config: each that the config calls for is there with its shape and a
 * float dtype, and the layers hold no other.
 * @throws ModelFormatError naming the file and the tensor
 */
export function checkWeights(config: ModelConfig, tensors: ReadonlyMap<string, StoredTensor>): void {
  const expected = new Set<string>();
  const check = (shapes: WeightShapes): void => {
    for (const [name, shape] of Object.entries(shapes)) {
      expected.add(name);
      checkTensor(name, shape, tensors.get(name));
    }
  };
  check(outerShapes(config));
  for (let layer = 0; layer < config.layers; layer += 1) check(layerShapes(config, layer));
  for (const tensor of tensors.values()) {
    if (tensor.name.startsWith('model.') && !expected.has(tensor.name) && !isRecomputed(tensor.name)) {
      throw new ModelFormatError(
        `${tensor.file}: tensor '${excerpt(tensor.name)}' has no place in the model that config.json describes ` +
          `(${config.family}, ${config.layers} layers). The config is of another model; fetch both again.`,
        { subject: tensor.name, given: tensor.shape, wanted: 'no such tensor' },
      );
    }
  }
}

/** Old files carry the RoPE frequencies, which follow from the config. */
function isRecomputed(name: string): boolean {
  return name.endsWith('.rotary_emb.inv_freq');
}

function checkTensor(name: string, shape: readonly number[], tensor: StoredTensor | undefined): void {
  const wanted = `[${shape.join(', ')}]`;
  if (tensor === undefined) {
    throw new ModelFormatError(
      `the weights lack tensor '${name}' of shape ${wanted}, which config.json calls for. ` +
        'The download is incomplete, or the config is of another model; fetch both again.',
      { subject: name, given: 'no such tensor', wanted: shape },
    );
  }
  if (!weightDTypes.includes(tensor.dtype)) {
    throw new ModelFormatError(
      `${tensor.file}: tensor '${name}' has dtype ${tensor.dtype}, wanted ${weightDTypes.join(', ')}. ` +
        'Take the unquantized model.',
      { subject: name, given: tensor.dtype, wanted: weightDTypes },
    );
  }
  if (tensor.shape.length !== shape.length || tensor.shape.some((extent, axis) => extent !== shape[axis])) {
    throw new ModelFormatError(
      `${tensor.file}: tensor '${name}' has shape [${excerpt(tensor.shape.join(', '))}], wanted ${wanted}, by ` +
        'config.json. The config is of another model; fetch both again.',
      { subject: name, given: tensor.shape, wanted: shape },
    );
  }
}
