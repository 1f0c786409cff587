// Shared by prefill and decode attention on the CPU: which query rows read which keys, and the conversion of rows to
// f32.
#pragma once

#include "shared/cpu/simd.cpu.h"
#include "shared/paged/paged-attention.h"

namespace kv {
namespace KV_ISA {

// Finite, so that a row that has not seen a key yet never subtracts infinities.
constexpr float kLowestScore = -3e38f;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Converts `dim` elements and fills the rest up to `padded_dim` with zeros.
template <class T>
inline void load_row(const T* from, float* to, int dim, int padded_dim) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = to_float(from[d]);
  for (; d < padded_dim; ++d) to[d] = 0;
}

// The query rows of one batch entry that read one kv head. Row r is query r / group of query head first_head + r %
// group.
struct RowRange {
  int64_t first_token;
  int64_t first_head;
  int64_t group;
  int64_t queries;
  int32_t key_count;
  bool causal;
  const int32_t* blocks;

  RowRange(const PagedAttentionArguments& a, int32_t batch_entry, int64_t kv_head)
      : first_token(a.query_start[batch_entry]),
        first_head(kv_head * (a.query_heads / a.kv_heads)),
        group(a.query_heads / a.kv_heads),
        queries(a.query_start[batch_entry + 1] - a.query_start[batch_entry]),
        causal(a.causal) {
    const int64_t cache_head = int64_t{a.slots[batch_entry]} * a.kv_heads + kv_head;
    key_count = a.key_counts[cache_head];
    blocks = a.block_table + cache_head * a.table_width;
  }

  // Of one query head alone: row r is query r.
  static RowRange of_query_head(const PagedAttentionArguments& a, int32_t batch_entry, int64_t query_head) {
    RowRange range(a, batch_entry, query_head / (a.query_heads / a.kv_heads));
    range.first_head = query_head;
    range.group = 1;
    return range;
  }

  int64_t rows() const { return queries * group; }
  int64_t token(int64_t row) const { return first_token + row / group; }
  int64_t head(int64_t row) const { return first_head + row % group; }

  template <class T>
  const T* query(const PagedAttentionArguments& a, int64_t row) const {
    return static_cast<const T*>(a.query) + token(row) * a.query_token_stride + head(row) * a.query_head_stride;
  }

  // How many of the first keys the row sees. A later row never sees fewer.
  int32_t visible(int64_t row) const {
    const int64_t seen = causal ? key_count - queries + row / group + 1 : key_count;
    return seen > 0 ? static_cast<int32_t>(seen) : 0;
  }
};

}  // namespace KV_ISA
}  // namespace kv
