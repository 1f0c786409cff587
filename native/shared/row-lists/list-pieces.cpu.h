// Cuts lists into pieces of a fixed number of rows, which workers share, so that results do not depend on how many there
// are.
#pragma once

#include "shared/cpu/simd.cpu.h"
#include "shared/row-lists/row-lists.h"

namespace kv {
namespace KV_ISA {

template <class Body>
inline void with_value_type(DType dtype, Body&& body) {
  if (dtype == DType::i8) body(int8_t{});
  else with_float_type(dtype, body);
}

struct Piece {
  int64_t list;
  int32_t first;
  int32_t rows;

  // Whether a row is none of the pool, which it then says.
  bool leads_outside(const RowLists& lists) const {
    const int32_t* all = lists.value_rows + list * lists.capacity + first;
    bool outside = false;
    for (int32_t row = 0; row < rows; ++row) outside |= all[row] < 0 || all[row] >= lists.pool_rows;
    if (outside) __atomic_store_n(lists.list_outside, list, __ATOMIC_RELAXED);
    return outside;
  }
};

// The pieces of all lists, in memory of the caller.
class ListPieces {
 public:
  static int64_t count(const RowLists& lists, int32_t piece_rows) {
    int64_t pieces = 0;
    for (int64_t list = 0; list < lists.lists(); ++list) pieces += (lists.counts[list] + piece_rows - 1) / piece_rows;
    return pieces;
  }
  static size_t bytes(const RowLists& lists, int64_t pieces) {
    return static_cast<size_t>(pieces) * sizeof(Piece) + static_cast<size_t>(lists.lists() + 1) * sizeof(int64_t);
  }

  // `memory` has as many bytes as that.
  ListPieces(const RowLists& lists, int32_t piece_rows, int64_t pieces, void* memory)
      : pieces_(static_cast<Piece*>(memory)), first_(reinterpret_cast<int64_t*>(pieces_ + pieces)) {
    int64_t known = 0;
    for (int64_t list = 0; list < lists.lists(); ++list) {
      first_[list] = known;
      for (int32_t first = 0; first < lists.counts[list]; first += piece_rows) {
        const int32_t left = lists.counts[list] - first;
        pieces_[known++] = {list, first, left < piece_rows ? left : piece_rows};
      }
    }
    first_[lists.lists()] = known;
  }

  const Piece& operator[](size_t index) const { return pieces_[index]; }
  // The pieces of a list are first_of(list) .. first_of(list + 1) - 1.
  int64_t first_of(int64_t list) const { return first_[list]; }

 private:
  Piece* pieces_;
  int64_t* first_;
};

}  // namespace KV_ISA
}  // namespace kv
