#include "kernels/decompress-24/decompress-24.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// A block as lines of neighbours. In a block of keys, a line is a token and its elements are the dims. In a block of
// values, a line is a dim and its elements are the 64 tokens. Of each four neighbours in a line, two are kept.
struct KeyLines {
  int dim;

  constexpr int lines() const { return kBlock24Tokens; }
  constexpr int groups() const { return dim / 16; }
  // Indices in the dense block, in the non-zeros and in the metadata.
  constexpr int dense(int line, int element) const { return line * dim + element; }
  constexpr int non_zero(int line, int kept) const { return key_non_zero(line, kept, dim); }
  constexpr Meta16Place meta16(int line, int group) const { return key_meta16(line, group, dim); }
};

struct ValueLines {
  int dim;

  constexpr int lines() const { return dim; }
  constexpr int groups() const { return kBlock24Tokens / 16; }
  constexpr int dense(int line, int element) const { return element * dim + line; }
  constexpr int non_zero(int line, int kept) const { return value_non_zero(kept, line); }
  constexpr Meta16Place meta16(int line, int group) const { return value_meta16(line, group); }
};

// Calls body with the lines of an operand's blocks.
template <class Body>
inline void with_lines(KvOperand operand, int head_dim, Body&& body) {
  if (operand == KvOperand::keys) return body(KeyLines{head_dim});
  body(ValueLines{head_dim});
}

template <class Lines>
void decompress(const Lines& lines, const uint16_t* non_zeros, const uint32_t* metadata, uint16_t* dense) {
  std::memset(dense, 0, static_cast<size_t>(kBlock24Tokens * lines.dim) * sizeof(uint16_t));
  for (int line = 0; line < lines.lines(); ++line) {
    for (int group = 0; group < lines.groups(); ++group) {
      const Meta16Place place = lines.meta16(line, group);
      uint32_t meta = metadata[place.word] >> place.shift;
      for (int n = 0; n < 8; ++n, meta >>= 2) {
        const int element = 16 * group + n / 2 * 4 + static_cast<int>(meta & 3);
        dense[lines.dense(line, element)] = non_zeros[lines.non_zero(line, 8 * group + n)];
      }
    }
  }
}

}  // namespace

void decompress_24(const Decompress24Arguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.count), [&](size_t index, int) {
    const int64_t id = a.ids[index];
    const auto* non_zeros = static_cast<const uint16_t*>(a.sparse.non_zeros) + id * sparse_block_elements(a.head_dim);
    const uint32_t* metadata = a.sparse.metadata + id * sparse_block_words(a.head_dim);
    uint16_t* dense =
        static_cast<uint16_t*>(a.dense) + int64_t{a.places[index]} * kBlock24Tokens * a.head_dim;
    with_lines(a.operand, a.head_dim, [&](const auto& lines) { decompress(lines, non_zeros, metadata, dense); });
  });
}

}  // namespace KV_ISA
}  // namespace kv
