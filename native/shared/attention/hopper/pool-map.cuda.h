// The tensor map through which TMA reads a paged pool. Host code.
#pragma once

#include "runtime/tensor-map.cuda.h"
#include "shared/attention/hopper/tiles.cuda.h"
#include "shared/paged/paged-attention.h"

namespace kv::sm90a {

// Tokens of one box: the largest power of two that divides both. `tile` is a power of two.
inline int common_box(int block_tokens, int tile) {
  int box = tile;
  while (block_tokens % box != 0) box /= 2;
  return box;
}

// The tensor map of `pool`, [block, block_token, dim]. A box is `box_tokens` tokens by the columns of one panel.
inline Status describe_pool(const PagedBatch& batch, const void* pool, int box_tokens, CUtensorMap* map) {
  TensorBox tensor;
  tensor.dtype = batch.cache_dtype;
  tensor.data = pool;
  tensor.extents = {batch.head_dim, batch.block_tokens, batch.block_count};
  tensor.strides = {batch.token_stride, batch.block_stride};
  tensor.box = {kPanelColumns, box_tokens, 1};
  return encode_tensor_map(tensor, map);
}

}  // namespace kv::sm90a
