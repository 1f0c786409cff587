#include "kernels/append-kv/append-kv.h"

#include <string>

#include "kernels/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(append_kv, AppendKvArguments)

namespace {

Status invalid(std::string message) { return Status::failure(StatusCode::invalid_value, std::move(message)); }

Status validate_head(const AppendKvArguments& a, int32_t batch_entry, int32_t head) {
  const int64_t cache_head = int64_t{a.slots[batch_entry]} * a.kv_heads + head;
  const int64_t first = a.key_counts[cache_head];
  const int64_t end = first + a.query_start[batch_entry + 1] - a.query_start[batch_entry];
  const std::string place =
      "slot " + std::to_string(a.slots[batch_entry]) + ", kv head " + std::to_string(head);
  if (first < 0 || end < first || end > int64_t{a.table_width} * a.block_tokens) {
    return invalid(place + " holds " + std::to_string(first) + " keys; " + std::to_string(end - first) +
                   " more do not fit its " + std::to_string(a.table_width) + " blocks of " +
                   std::to_string(a.block_tokens) + ": give the slot more blocks first");
  }
  for (int64_t key = first; key < end; key += a.block_tokens - key % a.block_tokens) {
    const int32_t block = a.block_table[cache_head * a.table_width + key / a.block_tokens];
    if (block < 0) {
      return invalid(place + " has no block for key " + std::to_string(key) + " (the table says " +
                     std::to_string(block) + "): give the slot more blocks first");
    }
  }
  return Status::success();
}

Status validate(const AppendKvArguments& a) {
  if (!is_float(a.row_dtype) || !is_float(a.cache_dtype)) {
    return Status::failure(StatusCode::capability, "keys and values must be f32, f16 or bf16");
  }
  if (a.head_dim <= 0 || a.block_tokens <= 0 || a.kv_heads <= 0) {
    return invalid("head dimension (" + std::to_string(a.head_dim) + "), tokens of a block (" +
                   std::to_string(a.block_tokens) + ") and kv heads (" + std::to_string(a.kv_heads) +
                   ") must be positive");
  }
  for (int32_t b = 0; b < a.batch; ++b) {
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      Status status = validate_head(a, b, head);
      if (!status.ok()) return status;
    }
  }
  return Status::success();
}

}  // namespace

Status append_kv(const AppendKvArguments& arguments, ExecutionContext& context) {
  Status status = validate(arguments);
  if (!status.ok()) return status;
  append_kv_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
