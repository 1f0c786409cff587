import type { RawConfig } from './config-schema.js';
import type { ModelConfig, ModelFamily } from './model-config.js';

/**
 * What a family takes for granted where its config.json is silent; the figures are those of `transformers`.
 */
interface FamilyDefaults {
  /** null: as many as query heads. */
  readonly kvHeads: number | null;
  /** null: hiddenSize / queryHeads. */
  readonly headDim: number | null;
  readonly maxPositions: number;
  readonly bosId: number | null;
  readonly eosId: number | null;
}

export const familyDefaults: Readonly<Record<ModelFamily, FamilyDefaults>> = {
  llama: { kvHeads: null, headDim: null, maxPositions: 2048, bosId: 1, eosId: 2 },
  mistral: { kvHeads: 8, headDim: null, maxPositions: 131072, bosId: 1, eosId: 2 },
  qwen2: { kvHeads: 32, headDim: null, maxPositions: 32768, bosId: null, eosId: null },
  qwen3: { kvHeads: 32, headDim: 128, maxPositions: 32768, bosId: null, eosId: null },
};

type FamilyTraits = Pick<
  ModelConfig,
  'queryKeyValueBias' | 'attentionOutputBias' | 'mlpBias' | 'queryKeyNorm'
>;

/** Which biases and norms a family's layers have. */
export function familyTraits(family: ModelFamily, raw: RawConfig): FamilyTraits {
  const attentionBias = raw.attention_bias ?? false;
  const none = { queryKeyValueBias: false, attentionOutputBias: false, mlpBias: false, queryKeyNorm: false };
  switch (family) {
    case 'llama':
      return {
        ...none,
        queryKeyValueBias: attentionBias,
        attentionOutputBias: attentionBias,
        mlpBias: raw.mlp_bias ?? false,
      };
    case 'mistral':
      return none;
    case 'qwen2':
      return { ...none, queryKeyValueBias: true };
    case 'qwen3':
      return {
        ...none,
        queryKeyValueBias: attentionBias,
        attentionOutputBias: attentionBias,
        queryKeyNorm: true,
      };
  }
}

/** The smallest window of any layer, or null when every layer sees all earlier tokens. */
export function slidingWindow(family: ModelFamily, raw: RawConfig): number | null {
  if (family === 'llama') return null;
  const window = raw.sliding_window === undefined ? 4096 : raw.sliding_window;
  if (family === 'mistral') return window;
  if (!(raw.use_sliding_window ?? false)) return null;
  const windowed =
    raw.layer_types?.includes('sliding_attention') ?? (raw.max_window_layers ?? 28) < raw.num_hidden_layers;
  return windowed ? window : null;
}
