export { type BlockSparsity, type LayerSparsity } from './block-sparsity.js';
export { ElementMask } from './element-mask.js';
export { hieraSparsePrefill } from './hiera-sparse-prefill.js';
export { hieraSparseStore, type HieraSparseOptions } from './hiera-sparse-store.js';
export {
  type BlockLoss,
  blockTokens,
  type KvOperand,
  type MixedBlocks,
  type SparseBlocks,
  sparseBlockElements,
  sparseBlockWords,
  type SparseDType,
} from './mixed-blocks.js';
export { compress24, type Compress24Arguments, type Pruning } from './operations/compress-24.js';
export { type BlockCopies, copyIndexMap, type CopyIndexMapArguments } from './operations/copy-index-map.js';
export { decompress24, type Decompress24Arguments } from './operations/decompress-24.js';
export { type MixedAttentionArguments } from './operations/mixed-attention-arguments.js';
export { mixedDecodeAttention } from './operations/mixed-decode-attention.js';
export { mixedPrefillAttention } from './operations/mixed-prefill-attention.js';
