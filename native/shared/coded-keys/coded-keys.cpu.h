// Codes of coded blocks, for CPU kernels.
#pragma once

#include "shared/coded-keys/coded-keys.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

// One chunk of a coded block.
struct CodeChunk {
  uint32_t* words;
  int quads;
  int bits;

  int streams() const { return kChunkOctets * quads; }

  // The code at a place of a stream.
  int code(int stream, int place) const {
    const int bit = place * bits;
    const int word = bit / 32, shift = bit % 32;
    const uint64_t low = words[word * streams() + stream];
    const uint64_t high = shift + bits > 32 ? words[(word + 1) * streams() + stream] : 0;
    return static_cast<int>((low | high << 32) >> shift) & ((1 << bits) - 1);
  }

  // Writes all codes of a stream. `codes` are in the order of their places.
  void write(int stream, const uint16_t* codes) const {
    uint64_t pending = 0;
    int filled = 0;
    uint32_t* word = words + stream;
    for (int place = 0; place < kStreamCodes; ++place) {
      pending |= uint64_t{codes[place]} << filled;
      filled += bits;
      if (filled < 32) continue;
      *word = static_cast<uint32_t>(pending);
      word += streams();
      pending >>= 32;
      filled -= 32;
    }
  }
};

inline CodeChunk chunk_of(const CodedKeys& keys, int64_t block, int chunk) {
  return {keys.block(block) + chunk_offset(chunk, keys.code_bits), quads_of_chunk(keys.groups(), chunk), keys.code_bits};
}

}  // namespace KV_ISA
}  // namespace kv
