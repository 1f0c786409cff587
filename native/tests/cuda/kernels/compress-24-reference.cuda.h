// What compress-24 is checked against: one block at a time on the host, as blocks-24.h describes it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "shared/blocks-24/blocks-24.h"

namespace kv::tests {

template <typename Element>
uint16_t bits_of(float value) {
  const Element element(value);
  uint16_t bits;
  std::memcpy(&bits, &element, 2);
  return bits;
}

struct HostBlock {
  std::vector<uint16_t> non_zeros;
  std::vector<uint32_t> metadata;
  std::vector<uint16_t> masked;  // [block_token, dim]: what decompressing gives
  double loss = 0.0;
};

// Bits of f16 or bf16 as a number; f32 of bf16 has the same leading bits.
inline double magnitude_of(uint16_t bits, DType dtype) {
  bits &= 0x7fff;
  if (dtype == DType::bf16) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  __half value;
  std::memcpy(static_cast<void*>(&value), &bits, 2);
  return static_cast<double>(static_cast<float>(value));
}

// `mask`, [block_token, dim], or null for the two of largest magnitude.
inline HostBlock compress_on_host(const uint16_t* dense, const uint8_t* mask, KvOperand operand, DType dtype,
                                  int dims) {
  const bool keys = operand == KvOperand::keys;
  HostBlock block;
  block.non_zeros.resize(sparse_block_elements(dims));
  block.metadata.resize(sparse_block_words(dims));
  block.masked.resize(kBlock24Tokens * dims);
  // Group `group` of row `row`: of dims of a token, or of tokens of a dim.
  for (int row = 0; row < (keys ? kBlock24Tokens : dims); ++row) {
    for (int group = 0; group < (keys ? dims : kBlock24Tokens) / 4; ++group) {
      const auto at = [&](int i) { return keys ? row * dims + 4 * group + i : (4 * group + i) * dims + row; };
      std::vector<int> kept;
      if (mask != nullptr) {
        for (int i = 0; i < 4; ++i) {
          if (mask[at(i)] != 0) kept.push_back(i);
        }
      } else {
        for (int i = 0; i < 4; ++i) {
          int beaten = 0;
          for (int j = 0; j < 4; ++j) {
            const int own = dense[at(i)] & 0x7fff;
            const int other = dense[at(j)] & 0x7fff;
            beaten += other > own || (other == own && j < i);
          }
          if (beaten < 2) kept.push_back(i);
        }
      }
      for (int i = 0; i < 4; ++i) {
        bool stays = false;
        for (const int place : kept) stays = stays || place == i;
        if (stays) {
          block.masked[at(i)] = dense[at(i)];
        } else {
          block.loss += magnitude_of(dense[at(i)], dtype);
        }
      }
      for (int i = 0; kept.size() < 2; ++i) {
        bool taken = false;
        for (const int place : kept) taken = taken || place == i;
        if (!taken) kept.push_back(i);
      }
      if (kept[0] > kept[1]) std::swap(kept[0], kept[1]);
      for (int j = 0; j < 2; ++j) {
        const int place = keys ? key_non_zero(row, 2 * group + j, dims) : value_non_zero(2 * group + j, row);
        block.non_zeros[place] = block.masked[at(kept[j])];
      }
      const Meta16Place place = keys ? key_meta16(row, group / 4, dims) : value_meta16(row, group / 4);
      block.metadata[place.word] |= uint32_t(kept[1] << 2 | kept[0]) << (place.shift + group % 4 * 4);
    }
  }
  return block;
}

}  // namespace kv::tests
