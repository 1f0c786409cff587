import type { RopeScaling } from '@kv/sparse-core';

/** The model families that the runner knows. */
export type ModelFamily = 'llama' | 'mistral' | 'qwen2' | 'qwen3';

/** Rotary position embedding: pair i of a head turns by position × theta^(-2i / headDim), then scaled. */
export interface RopeConfig {
  readonly theta: number;
  readonly scaling: RopeScaling;
}

/** What a model directory says about its model, in one spelling for every family. */
export interface ModelConfig {
  readonly family: ModelFamily;
  readonly layers: number;
  readonly hiddenSize: number;
  readonly queryHeads: number;
  /** Divides `queryHeads`. */
  readonly kvHeads: number;
  /** Not always `hiddenSize / queryHeads`. */
  readonly headDim: number;
  readonly intermediateSize: number;
  readonly vocabularySize: number;
  readonly rmsNormEpsilon: number;
  readonly rope: RopeConfig;
  /** The output head is the embedding matrix. */
  readonly tiedHead: boolean;
  readonly queryKeyValueBias: boolean;
  readonly attentionOutputBias: boolean;
  readonly mlpBias: boolean;
  /** RMSNorm over each query and key head before RoPE (Qwen3). */
  readonly queryKeyNorm: boolean;
  /** Tokens that the model was made for, prompt and answer together. */
  readonly maxPositions: number;
  /** Tokens that a query of some layer may look back over, itself included; null: all. */
  readonly slidingWindow: number | null;
  /** The dtype that the config declares. The weights' own dtype is what counts. */
  readonly declaredDType: string | null;
  readonly bosId: number | null;
  /** Any of these ends an answer. */
  readonly eosIds: readonly number[];
}
