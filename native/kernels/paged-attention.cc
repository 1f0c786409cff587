#include "kernels/paged-attention.h"

#include <string>

namespace kv {
namespace {

Status invalid(std::string message) { return Status::failure(StatusCode::invalid_value, std::move(message)); }

}  // namespace

Status validate_shape(const PagedAttentionArguments& a) {
  if (a.kv_heads <= 0 || a.query_heads <= 0 || a.query_heads % a.kv_heads != 0) {
    return invalid("the query heads (" + std::to_string(a.query_heads) +
                   ") must be a multiple of the kv heads (" + std::to_string(a.kv_heads) + ")");
  }
  if (a.head_dim <= 0)
    return invalid("the head dimension is " + std::to_string(a.head_dim) + ", it must be positive");
  if (a.block_tokens <= 0) {
    return invalid("a block holds " + std::to_string(a.block_tokens) + " tokens, it must hold at least one");
  }
  if (!is_float(a.query_dtype) || !is_float(a.output_dtype) || !is_float(a.cache_dtype)) {
    return Status::failure(StatusCode::capability,
                           "queries, outputs, keys and values must be f32, f16 or bf16");
  }
  return Status::success();
}

Status validate_counts(const PagedAttentionArguments& a) {
  for (int32_t b = 0; b < a.batch; ++b) {
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int32_t count = a.key_counts[int64_t{a.slots[b]} * a.kv_heads + head];
      if (count >= 0 && count <= int64_t{a.table_width} * a.block_tokens) continue;
      return invalid("slot " + std::to_string(a.slots[b]) + ", kv head " + std::to_string(head) +
                     " says it has " + std::to_string(count) + " keys, but its " +
                     std::to_string(a.table_width) + " blocks hold 0 to " +
                     std::to_string(int64_t{a.table_width} * a.block_tokens));
    }
  }
  return Status::success();
}

}  // namespace kv
