// Coded blocks of keys: product quantization (HCAttention, section 3.1). A key of D dims is cut into `groups` sub-vectors
// of D / groups neighbouring dims each. The code of a sub-vector is the number of its nearest centroid in a codebook.
//
// A coded block is 64 consecutive tokens of one kv head, and all its tokens count. A pool of coded blocks is
// u8 [coded_block, byte]: first the codes of all blocks, which so begin at whole lines of memory, then two words for each
// block. Bit t of the first says that token t is spoilt, and of the second that token 32 + t is: no centroid is near to a sub-vector of its key, which holds a NaN, an infinity,
// or a number whose distances are infinite. That sub-vector has code 0; scores with the token, and its key when it is
// decoded, are NaN.
//
// A code takes `bits` bits. Groups are filled up to a multiple of four with codes of 0.
//
// The codes of a block are a row of little-endian words of 32 bits, cut into chunks of 16 groups; the last chunk may have fewer. Within a
// chunk, four groups are a quad. The 32 codes of a stream are those of the eight tokens that are congruent to
// 4 * octet .. 4 * octet + 3 modulo 32, in one quad: the code of token 32 * tile + 4 * octet + t and of group g of the quad
// has place p = 16 * tile + 4 * t + g in the stream, and lies in its bits p * bits and following, lowest first. So a
// stream is `bits` words. A chunk has its streams' first words side by side, then their second words, and so on; the
// stream of (octet, quad) is number octet * quads + quad.
//
// So one load of a warp, or of a vector, reads the same word of neighbouring streams, whose codes all begin at the same
// bit. On tensor cores octet and quad are the row and the column of a lane's part of a [16, 16] operand.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace kv {

constexpr int kCodedBlockTokens = 64;
constexpr int kMostCodedDims = 512;
constexpr int kMostCentroids = 8192;
constexpr int kMostCodeBits = 16;

constexpr int kChunkGroups = 16;
constexpr int kQuadGroups = 4;
constexpr int kStreamCodes = 32;
constexpr int kChunkOctets = 8;
constexpr int kSpoiltWords = kCodedBlockTokens / 32;

// Groups with those that fill up the last quad.
constexpr int coded_groups(int groups) { return (groups + kQuadGroups - 1) / kQuadGroups * kQuadGroups; }

// Words of a block's codes, and bytes of all that a block takes.
constexpr int64_t coded_block_words(int groups, int bits) { return int64_t{2} * coded_groups(groups) * bits; }
constexpr int64_t coded_block_bytes(int groups, int bits) {
  return 4 * (coded_block_words(groups, bits) + kSpoiltWords);
}

// How many quads a chunk has.
constexpr int quads_of_chunk(int groups, int chunk) {
  const int left = coded_groups(groups) - chunk * kChunkGroups;
  return (left < kChunkGroups ? left : kChunkGroups) / kQuadGroups;
}

constexpr int coded_chunks(int groups) { return (groups + kChunkGroups - 1) / kChunkGroups; }

// Where a chunk begins, in words.
constexpr int64_t chunk_offset(int chunk, int bits) { return int64_t{kStreamCodes} * chunk * bits; }

// The token of the block that place `place` of a stream belongs to, and the group of the quad.
constexpr int token_of(int octet, int place) { return place / 16 * 32 + octet * 4 + place / 4 % 4; }
constexpr int group_of(int place) { return place % kQuadGroups; }

// What the operations over coded blocks share.
struct CodedKeys {
  // Coded blocks, [coded_block, byte].
  uint32_t* codes = nullptr;
  int32_t block_count = 0;
  int32_t code_bits = 13;  // 1 to 16
  // Codebooks, f16 [kv_head, book, centroid, sub_dim], contiguous. One book is of all groups, or each group has its own.
  const uint16_t* centroids = nullptr;
  int32_t centroid_count = 0;  // at most 2^code_bits; a code beyond counts as the last one
  int32_t books = 1;
  int32_t sub_dim = 0;
  // [kv_head, dim], or null for all 1: a key is about scale * centroid.
  const float* channel_scale = nullptr;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;

  constexpr int groups() const { return head_dim / sub_dim; }
  // The codes of a block, and the bits of its spoilt tokens.
  constexpr uint32_t* block(int64_t number) const { return codes + number * coded_block_words(groups(), code_bits); }
  constexpr uint32_t* spoilt(int64_t number) const { return block(block_count) + number * kSpoiltWords; }
  constexpr int64_t book_elements() const { return int64_t{centroid_count} * sub_dim; }
  // Where the book of a group of a kv head begins in `centroids`.
  constexpr int64_t book_offset(int head, int group) const {
    return (int64_t{head} * books + (books == 1 ? 0 : group)) * book_elements();
  }
};

// Coded blocks and the dense blocks that they are made of, or become.
struct CodedKeyCopies : CodedKeys {
  // Dense blocks, [block, block_token 64, dim]. Strides count elements, dims are contiguous.
  void* keys = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  // Blocks of the pools, and the kv head that each is of. None of `to` occurs twice.
  const int32_t* from = nullptr;   // [copies]
  const int32_t* to = nullptr;     // [copies]
  const int32_t* heads = nullptr;  // [copies]
  int32_t copies = 0;
};

// Refuses sizes that contradict each other (invalid_value) and those that there are no kernels for (capability).
Status validate_coded_keys(const CodedKeys& keys);

}  // namespace kv
