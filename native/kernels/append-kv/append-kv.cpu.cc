#include "kernels/append-kv/append-kv.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class From, class To>
void cast_row(const From* from, To* to, int dim) {
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, load(from + d));
  for (; d < dim; ++d) from_float(to + d, to_float(from[d]));
}

template <class From, class To>
void append(const AppendKvArguments& a, int32_t batch_entry, int32_t head) {
  const int64_t cache_head = int64_t{a.slots[batch_entry]} * a.kv_heads + head;
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  int32_t& count = a.key_counts[cache_head];
  for (int64_t token = a.query_start[batch_entry]; token < a.query_start[batch_entry + 1]; ++token, ++count) {
    const int64_t from = token * a.row_token_stride + head * a.row_head_stride;
    const int64_t to =
        blocks[count / a.block_tokens] * a.block_stride + count % a.block_tokens * a.token_stride;
    cast_row(static_cast<const From*>(a.keys) + from, static_cast<To*>(a.key_pool) + to, a.head_dim);
    cast_row(static_cast<const From*>(a.values) + from, static_cast<To*>(a.value_pool) + to, a.head_dim);
  }
}

}  // namespace

void append_kv(const AppendKvArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads), [&](size_t index, int) {
    const int32_t item = static_cast<int32_t>(index);
    with_float_type(a.row_dtype, [&](auto row) {
      with_float_type(a.cache_dtype, [&](auto cached) {
        append<decltype(row), decltype(cached)>(a, item / a.kv_heads, item % a.kv_heads);
      });
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
