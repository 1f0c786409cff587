import { join } from 'node:path';

import { CapabilityError, ModelFormatError } from '@kv/sparse-core';
import { withDirectory } from '@kv/sparse-core/testing';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';

import { goldenDirectory, needleModel } from '../testing/paths.js';
import { parseModelConfig, readModelConfig } from './read-model-config.js';

/** The fields that no config may lack, as Llama 2 7B has them. */
const minimal = {
  model_type: 'llama',
  vocab_size: 32000,
  hidden_size: 4096,
  intermediate_size: 11008,
  num_hidden_layers: 32,
  num_attention_heads: 32,
};
const parse = (fields: object): ReturnType<typeof parseModelConfig> =>
  parseModelConfig('config.json', { ...minimal, ...fields });
const llama3 = { factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8192 };

describe('a config', () => {
  it('of the small trained model is read in the old spelling', async () => {
    expect(await readModelConfig(needleModel)).toEqual({
      family: 'llama',
      layers: 8,
      hiddenSize: 256,
      queryHeads: 8,
      kvHeads: 2,
      headDim: 64,
      intermediateSize: 704,
      vocabularySize: 4096,
      rmsNormEpsilon: 1e-5,
      rope: { theta: 500_000, scaling: { kind: 'none' } },
      tiedHead: true,
      queryKeyValueBias: false,
      attentionOutputBias: false,
      mlpBias: false,
      queryKeyNorm: false,
      maxPositions: 16_384,
      slidingWindow: null,
      declaredDType: 'bfloat16',
      bosId: 0,
      eosIds: [1],
    });
  });

  it.each([
    ['llama31-gqa', { family: 'llama', kvHeads: 2, headDim: 32, declaredDType: 'bfloat16' }],
    ['mistral', { family: 'mistral', slidingWindow: null, declaredDType: 'float16' }],
    [
      'qwen2',
      { family: 'qwen2', headDim: 16, queryKeyValueBias: true, attentionOutputBias: false, tiedHead: true },
    ],
    ['qwen3', { family: 'qwen3', headDim: 64, queryKeyNorm: true, queryKeyValueBias: false }],
  ])('of %s is read in the new spelling', async (name, wanted) => {
    expect(await readModelConfig(join(goldenDirectory, name))).toMatchObject(wanted);
  });

  it('says the same in both spellings of RoPE', () => {
    const old = parse({
      rope_theta: 5e5,
      rope_scaling: { ...llama3, rope_type: 'llama3' },
      torch_dtype: 'bfloat16',
    });
    const fresh = parse({
      rope_parameters: { ...llama3, rope_type: 'llama3', rope_theta: 5e5 },
      dtype: 'bfloat16',
    });
    expect(fresh).toEqual(old);
    expect(old.rope).toEqual({
      theta: 5e5,
      scaling: {
        kind: 'llama3',
        factor: 8,
        lowFrequencyFactor: 1,
        highFrequencyFactor: 4,
        originalMaxPositions: 8192,
      },
    });
    expect(parse({ rope_scaling: { type: 'linear', factor: 4 } }).rope.scaling).toEqual({
      kind: 'linear',
      factor: 4,
    });
  });

  it.each([
    ['llama', { kvHeads: 32, headDim: 128, maxPositions: 2048, bosId: 1, eosIds: [2], slidingWindow: null }],
    [
      'mistral',
      { kvHeads: 8, headDim: 128, maxPositions: 131_072, slidingWindow: 4096, queryKeyValueBias: false },
    ],
    [
      'qwen2',
      { kvHeads: 32, headDim: 128, bosId: null, eosIds: [], slidingWindow: null, queryKeyValueBias: true },
    ],
    ['qwen3', { kvHeads: 32, headDim: 128, maxPositions: 32_768, slidingWindow: null, queryKeyNorm: true }],
  ])('of %s takes the defaults of transformers for absent fields', (family, wanted) => {
    expect(parse({ model_type: family })).toMatchObject({
      rmsNormEpsilon: 1e-6,
      rope: { theta: 10_000, scaling: { kind: 'none' } },
      tiedHead: false,
      ...wanted,
    });
  });

  it('may have as many kv heads as query heads, heads of a size of their own, no end token', () => {
    const config = parse({
      model_type: 'mistral',
      num_key_value_heads: null,
      head_dim: 96,
      eos_token_id: null,
    });
    expect(config).toMatchObject({ kvHeads: 32, headDim: 96, eosIds: [] });
  });

  it('has biases where the family has them', () => {
    const llama = parse({ attention_bias: true, mlp_bias: true });
    expect(llama).toMatchObject({ queryKeyValueBias: true, attentionOutputBias: true, mlpBias: true });
    const qwen3 = parse({ model_type: 'qwen3', attention_bias: true, mlp_bias: true });
    expect(qwen3).toMatchObject({ queryKeyValueBias: true, attentionOutputBias: true, mlpBias: false });
  });

  it('of Qwen has a sliding window only where one of its layers uses it', () => {
    const qwen = (fields: object) =>
      parse({ model_type: 'qwen2', sliding_window: 512, ...fields }).slidingWindow;
    expect(qwen({})).toBeNull();
    expect(qwen({ use_sliding_window: true })).toBe(512);
    expect(qwen({ use_sliding_window: true, max_window_layers: 32 })).toBeNull();
    expect(qwen({ use_sliding_window: true, layer_types: ['full_attention', 'full_attention'] })).toBeNull();
  });

  it('takes the end tokens of generation_config.json before its own', async () => {
    const files = {
      'config.json': JSON.stringify({ ...minimal, eos_token_id: 7 }),
      'generation_config.json': '{"eos_token_id": [7, 9]}',
    };
    expect((await withDirectory(files, readModelConfig)).eosIds).toEqual([7, 9]);
  });
});

describe('a config is refused', () => {
  const cases: [string, object, RegExp][] = [
    ['without model_type', { model_type: undefined }, /model_type/],
    ['without hidden_size', { hidden_size: undefined }, /hidden_size/],
    ['with no layers', { num_hidden_layers: 0 }, /num_hidden_layers: given 0/],
    ['with a negative vocabulary', { vocab_size: -1 }, /vocab_size: given -1/],
    ['with more tokens than an i32 numbers', { vocab_size: 2 ** 31 }, /vocab_size: given 2147483648/],
    ['with a fractional hidden_size', { hidden_size: 40.5 }, /hidden_size/],
    ['with a text for a number', { num_attention_heads: '32' }, /num_attention_heads: given "32"/],
    [
      'with kv heads that do not divide the query heads',
      { num_key_value_heads: 5 },
      /num_key_value_heads: given 5/,
    ],
    ['with an odd head_dim', { head_dim: 65 }, /head_dim: given 65/],
    ['with heads that do not divide hidden_size', { hidden_size: 4098 }, /head_dim/],
    ['with epsilon zero', { rms_norm_eps: 0 }, /rms_norm_eps/],
    ['with rope_theta zero', { rope_theta: 0 }, /rope_theta/],
    ['with linear scaling but no factor', { rope_scaling: { type: 'linear' } }, /no factor/],
    [
      'with llama3 scaling but no high_freq_factor',
      { rope_scaling: { rope_type: 'llama3', factor: 8, low_freq_factor: 1 } },
      /no high_freq_factor/,
    ],
    [
      'with llama3 factors in the wrong order',
      { rope_scaling: { ...llama3, rope_type: 'llama3', low_freq_factor: 4 } },
      /high_freq_factor: given 4/,
    ],
    [
      'with two values of rope_theta',
      { rope_theta: 1, rope_parameters: { rope_theta: 2 } },
      /rope_theta: given 1 beside 2/,
    ],
    [
      'with two kinds of scaling',
      { rope_scaling: { type: 'linear', factor: 2 }, rope_parameters: { rope_type: 'default' } },
      /one kind/,
    ],
    ['with a negative end token', { eos_token_id: [-1] }, /eos_token_id/],
  ];
  it.each(cases)('%s', (_name, fields, message) => {
    expect(() => parse(fields)).toThrow(ModelFormatError);
    expect(() => parse(fields)).toThrow(message);
  });

  const unsupported: [string, object, RegExp][] = [
    ['of another family', { model_type: 'mamba' }, /'mamba'; it has llama, mistral, qwen2, qwen3/],
    ['with a family from the prototype', { model_type: 'constructor' }, /'constructor'/],
    ['with another activation', { hidden_act: 'gelu' }, /'gelu'/],
    ['with YaRN scaling', { rope_scaling: { rope_type: 'yarn', factor: 4 } }, /'yarn'/],
    ['with dynamic scaling', { rope_parameters: { rope_type: 'dynamic', factor: 4 } }, /'dynamic'/],
    ['with heads rotated in part', { partial_rotary_factor: 0.5 }, /partial_rotary_factor 0.5/],
    ['with quantized weights', { quantization_config: { quant_method: 'awq' } }, /quantized/],
  ];
  it.each(unsupported)('%s, as beyond what the runner can do', (_name, fields, message) => {
    expect(() => parse(fields)).toThrow(CapabilityError);
    expect(() => parse(fields)).toThrow(message);
  });

  it('that is missing, no JSON or no object', async () => {
    const refusal = (files: Record<string, string>): Promise<unknown> =>
      withDirectory(files, (directory) => readModelConfig(directory).catch((error: unknown) => error));
    for (const files of [{}, { 'config.json': '{' }, { 'config.json': '[]' }, { 'config.json': 'null' }]) {
      expect(await refusal(files)).toBeInstanceOf(ModelFormatError);
    }
    const wrong = {
      'config.json': JSON.stringify(minimal),
      'generation_config.json': '{"eos_token_id": "x"}',
    };
    expect(String(await refusal(wrong))).toMatch(/generation_config.json: eos_token_id/);
  });
});

describe('any config', () => {
  const often = (usual: fc.Arbitrary<unknown>): fc.Arbitrary<unknown> =>
    fc.oneof({ weight: 9, arbitrary: usual }, { weight: 1, arbitrary: fc.jsonValue() });
  const count = often(fc.integer({ min: 0, max: 128 }));
  const number = often(fc.oneof(fc.integer({ min: 1, max: 9 }), fc.double()));
  const rope = fc.record(
    {
      rope_type: often(fc.constantFrom('default', 'linear', 'llama3', 'yarn')),
      factor: number,
      low_freq_factor: number,
      high_freq_factor: number,
      rope_theta: number,
    },
    { requiredKeys: [] },
  );
  const edits = fc.record(
    {
      model_type: often(fc.constantFrom('llama', 'mistral', 'qwen2', 'qwen3', 'gemma')),
      hidden_act: often(fc.constantFrom('silu', 'silu', 'gelu')),
      num_attention_heads: often(fc.constantFrom(1, 2, 4, 32)),
      num_key_value_heads: often(fc.constantFrom(1, 2, 3, 4)),
      head_dim: often(fc.constantFrom(64, 80, 81)),
      hidden_size: count,
      vocab_size: count,
      rms_norm_eps: number,
      rope_theta: number,
      rope_scaling: often(rope),
      rope_parameters: often(rope),
      sliding_window: count,
      layer_types: often(fc.constant(['full_attention'])),
      eos_token_id: often(fc.array(fc.nat(9))),
    },
    { requiredKeys: [] },
  );

  const fewEdits = fc.tuple(edits, fc.nat()).map(([changes, pick]) => {
    const entries = Object.entries(changes);
    return {
      ...minimal,
      ...Object.fromEntries(entries.slice(pick % Math.max(1, entries.length)).slice(0, 2)),
    };
  });
  const configs = fc.oneof(
    edits.map((changes) => ({ ...minimal, ...changes })),
    fewEdits,
    fewEdits,
    fc.jsonValue(),
  );

  it('is read, or refused with a ModelFormatError or CapabilityError (10,000 cases)', () => {
    const outcomes = { read: 0, malformed: 0, unsupported: 0 };
    fc.assert(
      fc.property(configs, (json) => {
        try {
          const config = parseModelConfig('config.json', json);
          expect(config.queryHeads % config.kvHeads).toBe(0);
          expect(config.rope.theta).toBeGreaterThan(0);
          outcomes.read += 1;
        } catch (error) {
          if (error instanceof ModelFormatError) outcomes.malformed += 1;
          else if (error instanceof CapabilityError) outcomes.unsupported += 1;
          else throw error;
        }
      }),
      { numRuns: 10_000, seed: 20_260_102 },
    );
    expect(outcomes.read).toBeGreaterThan(100);
    expect(outcomes.malformed).toBeGreaterThan(1000);
    expect(outcomes.unsupported).toBeGreaterThan(100);
  });
});
