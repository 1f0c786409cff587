import { join } from 'node:path';

import { createDevice, ModelFormatError } from '@kv/sparse-core';
import type { StoredTensor } from '@kv/sparse-core/native';
import { describe, expect, it } from 'vitest';

import { readModelConfig } from '../config/read-model-config.js';
import type { ModelConfig } from '../config/model-config.js';
import { readStoredTensors } from '../safetensors/weight-files.js';
import { goldenModel, goldenModels } from '../testing/golden.js';
import { needleModel } from '../testing/paths.js';
import { checkWeights } from './check-weights.js';
import { ModelWeights } from './model-weights.js';

const config = await readModelConfig(goldenModel('qwen3'));
const stored = await readStoredTensors(goldenModel('qwen3'));
const changed = (change: (tensors: Map<string, StoredTensor>) => void): Map<string, StoredTensor> => {
  const tensors = new Map(stored);
  change(tensors);
  return tensors;
};
const some: StoredTensor = {
  name: 'x',
  file: 'f',
  dtype: 'F32',
  shape: [96],
  byteOffset: 0,
  byteLength: 384,
};

describe('the weights', () => {
  it.each([...goldenModels.map(goldenModel), needleModel])('of %s fit their config', async (directory) => {
    const tensors = await readStoredTensors(directory);
    const own = await readModelConfig(directory);
    expect(() => {
      checkWeights(own, tensors);
    }).not.toThrow();
    expect(tensors.size).toBeGreaterThan(20);
  });

  it('may hold frequencies, and what is outside the model', () => {
    const tensors = changed((map) => {
      for (const name of ['model.layers.0.self_attn.rotary_emb.inv_freq', 'score.weight'])
        map.set(name, { ...some, name });
    });
    expect(() => {
      checkWeights(config, tensors);
    }).not.toThrow();
  });

  const contradictions: [string, Partial<ModelConfig>, RegExp][] = [
    ['more layers', { layers: 3 }, /lack tensor 'model.layers.2.input_layernorm.weight'/],
    ['fewer layers', { layers: 1 }, /'model.layers.1.*has no place/],
    ['a billion layers', { layers: 1e9 }, /lack tensor 'model.layers.2/],
    [
      'another vocabulary',
      { vocabularySize: 321 },
      /embed_tokens.weight' has shape \[320, 96\], wanted \[321, 96\]/,
    ],
    ['another hidden size', { hiddenSize: 64 }, /embed_tokens.weight' has shape/],
    ['more query heads', { queryHeads: 8 }, /q_proj.weight' has shape/],
    ['another number of kv heads', { kvHeads: 4 }, /k_proj.weight' has shape/],
    ['another head size', { headDim: 32 }, /q_proj.weight' has shape/],
    ['another intermediate size', { intermediateSize: 200 }, /gate_proj.weight' has shape/],
    [
      'biases that the weights lack',
      { queryKeyValueBias: true },
      /lack tensor 'model.layers.0.self_attn.q_proj.bias'/,
    ],
    [
      'no norm of queries and keys',
      { queryKeyNorm: false },
      /'model.layers.0.self_attn.*_norm.weight' has no place/,
    ],
  ];
  it.each(contradictions)('contradict a config with %s', (_name, fields, message) => {
    const check = (): void => {
      checkWeights({ ...config, ...fields }, stored);
    };
    expect(check).toThrow(ModelFormatError);
    expect(check).toThrow(message);
  });

  const damages: [string, (tensors: Map<string, StoredTensor>) => void, RegExp][] = [
    ['lack the untied head', (map) => map.delete('lm_head.weight'), /lack tensor 'lm_head.weight'/],
    ['lack a norm', (map) => map.delete('model.norm.weight'), /lack tensor 'model.norm.weight'/],
    [
      'are integers',
      (map) => map.set('model.norm.weight', { ...some, dtype: 'I32' }),
      /dtype I32, wanted F32, F16, BF16/,
    ],
    [
      'have another rank',
      (map) => map.set('model.norm.weight', { ...some, shape: [96, 1] }),
      /shape \[96, 1\], wanted \[96\]/,
    ],
  ];
  it.each(damages)('are refused when they %s', (_name, damage, message) => {
    const check = (): void => {
      checkWeights(config, changed(damage));
    };
    expect(check).toThrow(ModelFormatError);
    expect(check).toThrow(message);
  });
});

describe('mapped weights', () => {
  it('take no memory of the device, and are the numbers of the file', async () => {
    const device = createDevice({ threads: 1 });
    using weights = await ModelWeights.open(
      device,
      goldenModel('llama2-mha'),
      await readModelConfig(goldenModel('llama2-mha')),
    );
    expect(device.memory().live).toBe(0);
    expect(weights.layers).toHaveLength(2);
    expect(weights.layers[0]?.query.bias).toBeUndefined();
    expect((await weights.finalNorm.read()).length).toBe(96);
    expect(weights.embedding).toMatchObject({ dtype: 'f32', shape: [320, 96] });
  });

  it('of a tied head are the embedding', async () => {
    using weights = await ModelWeights.open(
      createDevice({ threads: 1 }),
      needleModel,
      await readModelConfig(needleModel),
    );
    expect(weights.head).toBe(weights.embedding);
    expect(weights.embedding.dtype).toBe('bf16');
  });

  it('are refused where the directory has none', async () => {
    const open = ModelWeights.open(createDevice({ threads: 1 }), join(needleModel, 'eval'), config);
    await expect(open).rejects.toThrow(ModelFormatError);
  });
});
