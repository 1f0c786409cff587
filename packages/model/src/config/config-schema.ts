import { z } from 'zod';

const count = z.int().positive();
/** Token ids are i32. */
const vocabulary = count.max(2 ** 31 - 1);
const optionalCount = count.nullish();
const flag = z.boolean().nullish();
const tokenId = z.int().nonnegative();

const ropeSchema = z.looseObject({
  rope_type: z.string().optional(),
  type: z.string().optional(),
  rope_theta: z.number().positive().optional(),
  partial_rotary_factor: z.number().optional(),
  factor: z.number().positive().optional(),
  low_freq_factor: z.number().positive().optional(),
  high_freq_factor: z.number().positive().optional(),
  original_max_position_embeddings: count.optional(),
});

/**
 * The fields of a config.json that the runner reads, under the names of both spellings; others pass unread.
 */
export const configSchema = z.object({
  model_type: z.string(),
  hidden_act: z.string().nullish(),
  vocab_size: vocabulary,
  hidden_size: count,
  intermediate_size: count,
  num_hidden_layers: count,
  num_attention_heads: count,
  num_key_value_heads: optionalCount,
  head_dim: optionalCount,
  max_position_embeddings: optionalCount,
  rms_norm_eps: z.number().positive().nullish(),
  tie_word_embeddings: flag,
  attention_bias: flag,
  mlp_bias: flag,
  rope_theta: z.number().positive().nullish(),
  partial_rotary_factor: z.number().nullish(),
  rope_scaling: ropeSchema.nullish(),
  rope_parameters: ropeSchema.nullish(),
  use_sliding_window: flag,
  sliding_window: optionalCount,
  max_window_layers: z.int().nonnegative().nullish(),
  layer_types: z.array(z.string()).nullish(),
  torch_dtype: z.string().nullish(),
  dtype: z.string().nullish(),
  bos_token_id: tokenId.nullish(),
  eos_token_id: z.union([tokenId, z.array(tokenId)]).nullish(),
  quantization_config: z.unknown().optional(),
});

export type RawConfig = z.infer<typeof configSchema>;
export type RawRope = z.infer<typeof ropeSchema>;

/** The one field of generation_config.json that the runner reads. */
export const generationConfigSchema = z.object({ eos_token_id: configSchema.shape.eos_token_id });
