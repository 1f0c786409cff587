import type { ModelConfig } from '../config/model-config.js';

/** Names, as in a model's files, and shapes, `[out, in]` or `[feature]`, of one part of a model. */
export type WeightShapes = Readonly<Record<string, readonly number[]>>;

/** The tensors that belong to no layer. */
export function outerShapes(config: ModelConfig): WeightShapes {
  const matrix = [config.vocabularySize, config.hiddenSize];
  return {
    'model.embed_tokens.weight': matrix,
    'model.norm.weight': [config.hiddenSize],
    ...(config.tiedHead ? {} : { 'lm_head.weight': matrix }),
  };
}

/** The tensors of one layer. */
export function layerShapes(config: ModelConfig, layer: number): WeightShapes {
  const { hiddenSize, intermediateSize, headDim } = config;
  const queryWidth = config.queryHeads * headDim;
  const kvWidth = config.kvHeads * headDim;
  const shapes: Record<string, readonly number[]> = {};
  const add = (name: string, shape: readonly number[]): void => {
    shapes[`model.layers.${layer}.${name}`] = shape;
  };
  const addLinear = (name: string, out: number, inner: number, bias: boolean): void => {
    add(`${name}.weight`, [out, inner]);
    if (bias) add(`${name}.bias`, [out]);
  };
  add('input_layernorm.weight', [hiddenSize]);
  addLinear('self_attn.q_proj', queryWidth, hiddenSize, config.queryKeyValueBias);
  addLinear('self_attn.k_proj', kvWidth, hiddenSize, config.queryKeyValueBias);
  addLinear('self_attn.v_proj', kvWidth, hiddenSize, config.queryKeyValueBias);
  addLinear('self_attn.o_proj', hiddenSize, queryWidth, config.attentionOutputBias);
  if (config.queryKeyNorm) {
    add('self_attn.q_norm.weight', [headDim]);
    add('self_attn.k_norm.weight', [headDim]);
  }
  add('post_attention_layernorm.weight', [hiddenSize]);
  addLinear('mlp.gate_proj', intermediateSize, hiddenSize, config.mlpBias);
  addLinear('mlp.up_proj', intermediateSize, hiddenSize, config.mlpBias);
  addLinear('mlp.down_proj', hiddenSize, intermediateSize, config.mlpBias);
  return shapes;
}
