// A cache of dense and 2:4 sparse blocks (HieraSparse, section III-B), and where each number of a sparse block
// lies. One layout for prefill and decode, CPU and CUDA: what tensor cores with 2:4 operands read.
//
// A block is 64 consecutive tokens of one kv head, of the keys or of the values. It is dense, `[block_token, dim]`,
// or sparse: of four neighbours two are kept, their values in the block of non-zeros and their places in the block
// of metadata. Neighbours of a key are dims of one token; neighbours of a value are tokens of one dim: the axes
// that S^T = K Q^T and O^T = V^T P^T sum over.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

constexpr int kBlock24Tokens = 64;

enum class KvOperand : uint8_t { keys, values };

// Sparse blocks of one operand. 16 bits an element, with 64 or 128 dims.
//
// Non-zeros, [sparse_block, 32 * dim] elements; its 16-byte chunks are swizzled so that tensor cores load them
// without conflicts, and so that a plain copy of the block to shared memory is already in that order:
//   keys: [token 64][kept dim dim/2]; row t keeps chunk c at c ^ (t & 7) with 128 dims (rows of 128 bytes), at
//     c ^ ((t >> 1) & 3) with 64 (rows of 64 bytes).
//   values: panels of 64 dims, each [kept token 32][dim 64]; row 2 q + j holds the j-th kept of tokens 4 q .. 4 q + 3;
//     row r keeps chunk c at c ^ (r & 7).
//
// Metadata, [sparse_block, 2 * dim] words. Sixteen neighbours have 16 bits, meta16: four nibbles, that of the first
// four neighbours lowest, each (second index << 2) | first index, indices ascending. A word holds two of them, for
// lane 4 g + c of the warp that multiplies a tile of 16 rows:
//   keys: word [tile of 16 tokens][lane][r < dim / 64] = meta16[token g][dims 16 (4 r + c) ..]
//                                                      | meta16[token g + 8][the same dims] << 16
//   values: word [tile of 16 dims][lane] = meta16[dim g][tokens 16 c ..] | meta16[dim g + 8][the same tokens] << 16
//
// Where fewer than two of four are kept, zeros are stored at the lowest places that are free.
struct SparseBlocks24 {
  const void* non_zeros = nullptr;
  const uint32_t* metadata = nullptr;
  int32_t block_count = 0;
};

constexpr int64_t sparse_block_elements(int head_dim) { return int64_t{32} * head_dim; }
constexpr int64_t sparse_block_words(int head_dim) { return int64_t{2} * head_dim; }

// Element of a sparse block of keys: kept number `kept` (of head_dim / 2) of a token.
constexpr int key_non_zero(int token, int kept, int head_dim) {
  const int swizzle = head_dim == 128 ? token & 7 : (token >> 1) & 3;
  return token * head_dim / 2 + (((kept / 8) ^ swizzle) * 8 + kept % 8);
}

// Element of a sparse block of values: kept token `kept` (of 32) of a dim.
constexpr int value_non_zero(int kept, int dim) {
  return dim / 64 * 2048 + kept * 64 + ((dim % 64 / 8) ^ (kept & 7)) * 8 + dim % 8;
}

// Where a meta16 lies: a word of the block and the bits that it is shifted by.
struct Meta16Place {
  int word;
  int shift;
};

// Of the dims 16 group .. 16 group + 15 of a token.
constexpr Meta16Place key_meta16(int token, int group, int head_dim) {
  const int lane = token % 8 * 4 + group % 4;
  return {(token / 16 * 32 + lane) * (head_dim / 64) + group / 4, token / 8 % 2 * 16};
}

// Of the tokens 16 group .. 16 group + 15 of a dim.
constexpr Meta16Place value_meta16(int dim, int group) {
  return {dim / 16 * 32 + dim % 8 * 4 + group, dim / 8 % 2 * 16};
}

// Attention over a cache with 2:4 blocks. Of the base:
//   `keys` and `values` are the pools of dense blocks, [dense_block, block_token, dim]; block_count is theirs.
//   `block_table`, [slot, kv_head, table_width], is the index map of the keys: d + 1 for dense block d, -(s + 1) for
//   sparse block s; 0 is no block.
//   `block_tokens` is 64, `head_dim` 64 or 128, `cache_dtype` f16 or bf16.
// A token block's keys and values may be of different kinds. A sparse block is full: 64 tokens that count.
struct Attention24Arguments : PagedAttentionArguments {
  const int32_t* value_table = nullptr;  // the index map of the values, as `block_table`
  SparseBlocks24 sparse_keys;
  SparseBlocks24 sparse_values;
  // What the host knows of the batch's maps: false promises that no entry is negative.
  bool has_sparse_keys = true;
  bool has_sparse_values = true;
};

// Refuses other dtypes than f16 and bf16, and other head sizes than 64 and 128 (capability).
Status validate_block_format(DType dtype, int32_t head_dim);

// Refuses memory of blocks that does not begin at a multiple of 16 bytes, which CUDA kernels move at once (capability).
Status validate_block_memory(std::initializer_list<const void*> memory);

// As of paged attention; refuses other block and head sizes and cache dtypes than those above (capability).
Status validate_sizes(const Attention24Arguments& arguments);

// As of paged attention, for both maps; also refuses sparse blocks where the arguments promise none, and a sparse
// block behind the last full one.
Status validate_tables(const Attention24Arguments& arguments);

}  // namespace kv
