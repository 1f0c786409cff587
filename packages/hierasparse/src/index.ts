export { type BlockSparsity, type LayerSparsity } from './block-sparsity.js';
export { ElementMask } from './element-mask.js';
export { hieraSparsePrefill } from './hiera-sparse-prefill.js';
export { hieraSparseStore, type HieraSparseOptions } from './hiera-sparse-store.js';
export {
  type BlockLoss,
  blockTokens,
  type KvOperand,
  type Blocks24,
  type SparseBlocks24,
  sparseBlockElements,
  sparseBlockWords,
  type SparseDType,
} from './blocks-24.js';
export { compress24, type Compress24Arguments, type Pruning } from './operations/compress-24.js';
export { type BlockCopies, copyIndexMap, type CopyIndexMapArguments } from './operations/copy-index-map.js';
export { decompress24, type Decompress24Arguments } from './operations/decompress-24.js';
export { type Attention24Arguments } from './operations/attention-24-arguments.js';
export { decodeAttention24 } from './operations/decode-attention-24.js';
export { prefillAttention24 } from './operations/prefill-attention-24.js';
