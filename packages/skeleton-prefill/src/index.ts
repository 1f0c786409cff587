export { antidiagonalPrefill, type AntidiagonalPrefillOptions } from './antidiagonal-prefill.js';
export { type BlockScoresArguments } from './block-scores.js';
export { type DenseReason } from './block-sparse-prefill.js';
export { type BlockRules, type BlockThreshold, type EstimateThreshold, keyBlockTokens, type TileBlocks } from './block-threshold.js';
export { clusteredPrefill } from './clustered-prefill.js';
export { type ExactTokens } from './exact-tokens.js';
export {
  antidiagonalBlockScores,
  type AntidiagonalBlockScoresArguments,
  type AntidiagonalStride,
} from './operations/antidiagonal-block-scores.js';
export { clusteredBlockScores } from './operations/clustered-block-scores.js';
export {
  decomposeAttention,
  type DecomposeAttentionArguments,
  type DecomposeAttentionOptions,
  type DecompositionFormulas,
  decompositionStateBytes,
} from './operations/decompose-attention.js';
export { pooledBlockScores } from './operations/pooled-block-scores.js';
export {
  type BlockEstimate,
  type BlockLists,
  type BlockScores,
  type NoEstimate,
  selectKeyBlocks,
  type SelectKeyBlocksArguments,
  type SelectKeyBlocksOptions,
  type SkeletonParts,
  type SlashBound,
} from './operations/select-key-blocks.js';
export { verticalSlashBlockScores } from './operations/vertical-slash-block-scores.js';
export { pooledPrefill } from './pooled-prefill.js';
export { type ScoredPrefillOptions, type ScoredPrefillSettings } from './scored-prefill.js';
export { skeletonPrefill, type SkeletonPrefillOptions, type SkeletonPrefillSettings } from './skeleton-prefill.js';
export { streamingPrefill, type StreamingPrefillOptions, type StreamingWindow } from './streaming-prefill.js';
export { verticalSlashPrefill } from './vertical-slash-prefill.js';
