import type { Device, KvLayer, RopeDescription } from '@kv/sparse-core';

/** A step of a prompt in one layer. */
export interface PromptStep {
  readonly layer: KvLayer;
  readonly rows: number;
  /** The step's own included. */
  readonly tokens: number;
  readonly rope: RopeDescription;
  /** Tokens that no row goes without, sinks and diagonal. */
  readonly exactTokens: number;
  /** The share of blocks that will be computed. */
  readonly share: number;
}

/**
 * How much longer a multiplication of the estimate takes than one of dense attention. On one H200 the estimate and the
 * selection took 0.82 ms for 16,384 tokens, dense attention 3.1; of longer prompts the estimate takes a smaller share.
 */
const weightOf: Readonly<Record<Device['kind'], number>> = { cpu: 1, cuda: 6.5 };
/** How much longer one of f64 takes than one of f32. */
const weightOfDoubles: Readonly<Record<Device['kind'], number>> = { cpu: 4, cuda: 10 };
/** Rows of a tile and keys of a block, of which a tile has some in vain. */
const tileTokens = 128 + 64;

/**
 * How much of dense attention's time the decomposition may take where a threshold does not say how many blocks it leaves.
 * Where attention is flat it leaves all, and this is what is lost. On a CPU it is little, at any length that is worth it.
 */
export const mostLost: Readonly<Record<Device['kind'], number>> = { cpu: Infinity, cuda: 0.1 };

/** The multiplications of dense attention. */
export function denseCost({ layer, rows, tokens }: PromptStep): number {
  return rows * (tokens - rows / 2) * 2 * layer.headDim * layer.queryHeads;
}

/**
 * Whether the estimate and what it leaves to compute take fewer multiplications than dense attention, and the estimate no
 * more than this share of them.
 */
export function isWorthEstimating(step: PromptStep, estimate: number, most = Infinity): boolean {
  const { layer, rows, exactTokens, share } = step;
  const dense = denseCost(step);
  const sparse = share * dense + rows * (exactTokens + tileTokens) * 2 * layer.headDim * layer.queryHeads;
  return sparse + estimate < dense && estimate <= most * dense;
}

/** The multiplications of `decomposeAttention`, each weighed. */
export function decompositionCost(kind: Device['kind'], step: PromptStep, samples: number): number {
  const { layer, rows, tokens, rope, exactTokens } = step;
  const { queryHeads, kvHeads, headDim } = layer;
  const coefficients = 2 * rope.inverseFrequencies.length + headDim;
  const ofKey = 2 * headDim * queryHeads;
  const ofRows = rows * (queryHeads + kvHeads) * headDim ** 2 + (rows * exactTokens * ofKey) / 2;
  const ofTokens = tokens * queryHeads * (coefficients + headDim);
  const ofSamples = kvHeads * coefficients ** 2 * (samples / 2 + coefficients / 6);
  return weightOf[kind] * (ofRows + ofTokens + weightOfDoubles[kind] * ofSamples);
}
