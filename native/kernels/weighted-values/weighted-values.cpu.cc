#include "kernels/weighted-values/weighted-values.h"

#include "runtime/workers.h"
#include "shared/row-lists/list-pieces.cpu.h"

namespace kv {
namespace KV_ISA {

namespace {

constexpr int64_t kNearBytes = 16384;  // of rows that stay in the first cache while all their dims are summed
constexpr int kTileHeads = 4;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // the sums of a tile stay in registers
constexpr int64_t kLine = 64;

// The sums of a piece: [group_head, dim].
template <class T>
class PieceSum {
 public:
  PieceSum(const WeightedValuesArguments& a, const Piece& piece, float* sums)
      : dims_(a.head_dim),
        group_(a.group),
        values_(static_cast<const T*>(a.values)),
        rows_(a.value_rows + piece.list * a.capacity + piece.first),
        weights_(a.weights + (piece.list * a.capacity + piece.first) * a.group),
        count_(piece.rows),
        near_(near_rows(a.head_dim)),
        sums_(sums) {}

  void add() const {
    std::memset(sums_, 0, static_cast<size_t>(group_ * dims_) * sizeof(float));
    for (int32_t row = 0; row < near_ && row < count_; ++row) prefetch(row);
    for (int32_t first = 0; first < count_; first += near_) {
      const int32_t end = first + near_ < count_ ? first + near_ : count_;
      int32_t head = 0;
      for (; head + kTileHeads <= group_; head += kTileHeads) add_heads<kTileHeads>(head, first, end);
      for (; head < group_; ++head) add_heads<1>(head, first, end);
    }
  }

 private:
  static int32_t near_rows(int64_t dims) {
    const int64_t bytes = dims * int64_t{sizeof(T)};
    return bytes == 0 || bytes > kNearBytes ? 1 : static_cast<int32_t>(kNearBytes / bytes);
  }

  void prefetch(int32_t row) const {
    const auto* bytes = reinterpret_cast<const char*>(values_ + rows_[row] * dims_);
    for (int64_t at = 0; at < dims_ * int64_t{sizeof(T)}; at += kLine) __builtin_prefetch(bytes + at);
  }

  template <int heads>
  void add_heads(int32_t head, int32_t first, int32_t end) const {
    int64_t dim = 0;
    for (; dim + kTileVectors * kLanes <= dims_; dim += kTileVectors * kLanes) add_tile<heads, kTileVectors>(head, dim, first, end);
    for (; dim + kLanes <= dims_; dim += kLanes) add_tile<heads, 1>(head, dim, first, end);
    for (; dim < dims_; ++dim) {
      for (int32_t row = first; row < end; ++row) {
        const float value = to_float(values_[rows_[row] * dims_ + dim]);
        for (int h = head; h < head + heads; ++h) sums_[h * dims_ + dim] += weights_[int64_t{row} * group_ + h] * value;
      }
    }
  }

  template <int heads, int vectors>
  void add_tile(int32_t head, int64_t dim, int32_t first, int32_t end) const {
    Vec sums[heads][vectors];
    for (int h = 0; h < heads; ++h) {
      for (int v = 0; v < vectors; ++v) sums[h][v] = load(sums_ + (head + h) * dims_ + dim + v * kLanes);
    }
    const bool is_first = head == 0 && dim == 0;
    for (int32_t row = first; row < end; ++row) {
      if (is_first && row + near_ < count_) prefetch(row + near_);
      const T* values = values_ + rows_[row] * dims_ + dim;
      const float* weights = weights_ + int64_t{row} * group_ + head;
      Vec own[vectors];
      for (int v = 0; v < vectors; ++v) own[v] = load(values + v * kLanes);
      for (int h = 0; h < heads; ++h) {
        for (int v = 0; v < vectors; ++v) sums[h][v] += own[v] * weights[h];
      }
    }
    for (int h = 0; h < heads; ++h) {
      for (int v = 0; v < vectors; ++v) store(sums_ + (head + h) * dims_ + dim + v * kLanes, sums[h][v]);
    }
  }

  const int64_t dims_;
  const int64_t group_;
  const T* values_;
  const int32_t* rows_;
  const float* weights_;
  const int32_t count_;
  const int32_t near_;
  float* sums_;
};

}  // namespace

void weighted_values(const WeightedValuesArguments& a, Workers& workers) {
  const int64_t pieces = ListPieces::count(a, kPieceRows);
  const int64_t of_list = int64_t{a.group} * a.head_dim;
  const auto sum_bytes = static_cast<size_t>(pieces * of_list) * sizeof(float);
  auto* memory = static_cast<char*>(workers.shared_scratch(ListPieces::bytes(a, pieces) + sum_bytes));
  const ListPieces table(a, kPieceRows, pieces, memory);
  auto* sums = reinterpret_cast<float*>(memory + ListPieces::bytes(a, pieces));
  workers.for_each(static_cast<size_t>(pieces), [&](size_t index, int) {
    if (table[index].leads_outside(a)) return;
    with_value_type(a.dtype, [&](auto element) {
      PieceSum<decltype(element)>(a, table[index], sums + static_cast<int64_t>(index) * of_list).add();
    });
  });
  if (*a.list_outside >= 0) return;
  const auto heads = static_cast<size_t>(a.lists() * a.group);
  workers.for_each(heads, [&](size_t head, int) {
    const auto list = static_cast<int64_t>(head) / a.group;
    const int64_t head_sums = static_cast<int64_t>(head) % a.group * a.head_dim;
    float* output = a.output + static_cast<int64_t>(head) * a.head_dim;
    std::memset(output, 0, static_cast<size_t>(a.head_dim) * sizeof(float));
    for (int64_t piece = table.first_of(list); piece < table.first_of(list + 1); ++piece) {
      const float* next = sums + piece * of_list + head_sums;
      for (int64_t dim = 0; dim < a.head_dim; ++dim) output[dim] += next[dim];
    }
  });
}

}  // namespace KV_ISA
}  // namespace kv
