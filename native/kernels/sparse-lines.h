// A block seen as lines of neighbours: a line of a block of keys is a token, whose elements are its dims; a line of
// a block of values is a dim, whose elements are its 64 tokens. Of four neighbours of a line two are kept.
#pragma once

#include "kernels/mixed-blocks.h"
#include "kernels/simd.h"

namespace kv {
namespace KV_ISA {

struct KeyLines {
  int dim;

  constexpr int lines() const { return kMixedBlockTokens; }
  constexpr int groups() const { return dim / 16; }
  // Places in the dense block, in the non-zeros and in the metadata.
  constexpr int dense(int line, int element) const { return line * dim + element; }
  constexpr int non_zero(int line, int kept) const { return key_non_zero(line, kept, dim); }
  constexpr Meta16Place meta16(int line, int group) const { return key_meta16(line, group, dim); }
};

struct ValueLines {
  int dim;

  constexpr int lines() const { return dim; }
  constexpr int groups() const { return kMixedBlockTokens / 16; }
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

}  // namespace KV_ISA
}  // namespace kv
