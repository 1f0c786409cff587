// A cache of dense and 2:4 sparse blocks (HieraSparse, section III-B), and where each number of a sparse block lies.
// Prefill and decode, CPU and CUDA share one layout: the one that tensor cores with 2:4 operands read.
//
// A block is 64 consecutive tokens of one kv head, of keys or of values. A dense block is `[block_token, dim]`. A
// sparse block keeps two of each four neighbours: their values are in the block of non-zeros, and their places in the
// block of metadata. Neighbours of a key are dims of one token; neighbours of a value are tokens of one dim. These
// are the axes that S^T = K Q^T and O^T = V^T P^T sum over.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "runtime/status.h"
#include "shared/paged/block-entry.h"
#include "shared/paged/paged-attention.h"

namespace kv {

constexpr int kBlock24Tokens = 64;

enum class KvOperand : uint8_t { keys, values };

// Sparse blocks of one operand, keys or values. Elements have 16 bits, heads 64 or 128 dims.
//
// Non-zeros are [sparse_block, 32 * dim] elements. The 16-byte chunks are swizzled, so that tensor cores load them
// without bank conflicts from a plain copy of the block in shared memory:
//   keys: [token 64][kept dim dim/2]. Row t has chunk c at c ^ (t & 7) with 128 dims (rows of 128 bytes), and at
//     c ^ ((t >> 1) & 3) with 64 dims (rows of 64 bytes).
//   values: panels of 64 dims, each [kept token 32][dim 64]. Row 2 q + j holds the j-th kept of the tokens
//     4 q .. 4 q + 3. Row r has chunk c at c ^ (r & 7).
//
// Metadata are [sparse_block, 2 * dim] words. A meta16 is the 16 bits of sixteen neighbours. It has four nibbles,
// that of the first four neighbours lowest. A nibble is (second index << 2) | first index, with ascending indices.
// Each word holds two meta16, for lane 4 g + c of the warp that multiplies a tile of 16 rows:
//   keys: word [tile of 16 tokens][lane][r < dim / 64] = meta16[token g][dims 16 (4 r + c) ..]
//                                                      | meta16[token g + 8][the same dims] << 16
//   values: word [tile of 16 dims][lane] = meta16[dim g][tokens 16 c ..] | meta16[dim g + 8][the same tokens] << 16
//
// If fewer than two of four neighbours are kept, zeros are stored for the lowest other places.
struct SparseBlocks24 {
  const void* non_zeros = nullptr;
  const uint32_t* metadata = nullptr;
  int32_t block_count = 0;
};

constexpr int64_t sparse_block_elements(int head_dim) { return int64_t{32} * head_dim; }
constexpr int64_t sparse_block_words(int head_dim) { return int64_t{2} * head_dim; }

// Index of an element in a sparse block of keys: the kept number `kept` (of head_dim / 2) of a token.
constexpr int key_non_zero(int token, int kept, int head_dim) {
  const int swizzle = head_dim == 128 ? token & 7 : (token >> 1) & 3;
  return token * head_dim / 2 + (((kept / 8) ^ swizzle) * 8 + kept % 8);
}

// Index of an element in a sparse block of values: the kept token number `kept` (of 32) of a dim.
constexpr int value_non_zero(int kept, int dim) {
  return dim / 64 * 2048 + kept * 64 + ((dim % 64 / 8) ^ (kept & 7)) * 8 + dim % 8;
}

// Where a meta16 lies: the word of the block, and the number of bits that the meta16 is shifted by.
struct Meta16Place {
  int word;
  int shift;
};

// The meta16 of the dims 16 group .. 16 group + 15 of a token.
constexpr Meta16Place key_meta16(int token, int group, int head_dim) {
  const int lane = token % 8 * 4 + group % 4;
  return {(token / 16 * 32 + lane) * (head_dim / 64) + group / 4, token / 8 % 2 * 16};
}

// The meta16 of the tokens 16 group .. 16 group + 15 of a dim.
constexpr Meta16Place value_meta16(int dim, int group) {
  return {dim / 16 * 32 + dim % 8 * 4 + group, dim / 8 % 2 * 16};
}

// Attention over a cache with 2:4 blocks. Fields of the base have this meaning:
//   `keys` and `values` are the pools of dense blocks, [dense_block, block_token, dim]. block_count counts these.
//   `block_table`, [slot, kv_head, table_width], is the index map of the keys. Its entries name dense blocks, and
//   blocks of the kind sparse_24 (block-entry.h). Where all blocks are dense, the kernels of a paged cache read it.
//   `block_tokens` is 64, `head_dim` 64 or 128, `cache_dtype` f16 or bf16.
// The keys of a token block may be dense and its values sparse, or the other way round. All 64 tokens of a sparse
// block count.
struct Attention24Arguments : PagedAttentionArguments {
  const int32_t* value_table = nullptr;  // the index map of the values, with entries as in `block_table`
  SparseBlocks24 sparse_keys;
  SparseBlocks24 sparse_values;
  // What the host knows of the batch's index maps. False promises that all blocks are dense.
  bool has_sparse_keys = true;
  bool has_sparse_values = true;
};

// Refuses dtypes other than f16 and bf16, and head sizes other than 64 and 128 (capability).
Status validate_block_format(DType dtype, int32_t head_dim);

// Refuses blocks whose memory does not begin at a multiple of 16 bytes, because CUDA kernels move 16 bytes at a time
// (capability).
Status validate_block_memory(std::initializer_list<const void*> memory);

// Checks what paged attention checks. Also refuses block sizes, head sizes and cache dtypes other than those above
// (capability).
Status validate_sizes(const Attention24Arguments& arguments);

// Checks what paged attention checks, for both maps. Also refuses sparse blocks where the arguments promise none, and
// sparse blocks after the last full block.
Status validate_tables(const Attention24Arguments& arguments);

}  // namespace kv
