#include "shared/paged/paged-attention.h"

#include <algorithm>
#include <string>

namespace kv {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

std::string place_of(const PagedBatch& b, int32_t entry, int32_t head) {
  return "slot " + text(b.slots[entry]) + ", kv head " + text(head);
}

// Checks that the table of one kv head of batch entry `entry` has room for `end` keys.
Status validate_capacity(const PagedBatch& b, int32_t entry, int32_t head, int64_t end) {
  const int64_t capacity = int64_t{b.table_width} * b.block_tokens;
  const int32_t count = b.key_counts[int64_t{b.slots[entry]} * b.kv_heads + head];
  if (count >= 0 && end <= capacity) return Status::success();
  return invalid(place_of(b, entry, head) + " counts " + text(count) + " keys and needs " + text(end) +
                 ", but its block table holds 0 to " + text(capacity) + ": give it a wider table");
}

// Checks the table of one kv head of batch entry `entry`, for the keys first .. end - 1.
Status validate_head(const PagedBatch& b, int32_t entry, int32_t head, int64_t first, int64_t end) {
  const Status status = validate_capacity(b, entry, head, end);
  if (!status.ok() || first >= end) return status;
  const int64_t cache_head = int64_t{b.slots[entry]} * b.kv_heads + head;
  const int32_t* table = b.block_table + cache_head * b.table_width;
  for (int64_t i = first / b.block_tokens; i * b.block_tokens < end; ++i) {
    if (table[i] < 0 || table[i] >= b.block_count) {
      const int64_t key = i * b.block_tokens < first ? first : i * b.block_tokens;
      return invalid(place_of(b, entry, head) + " has block " + text(table[i]) + " for key " + text(key) +
                     ", but blocks are 0 to " + text(b.block_count - 1) + ": give the slot a block first");
    }
  }
  return Status::success();
}

}  // namespace

Status validate_sizes(const PagedBatch& b) {
  if (!is_float(b.cache_dtype)) {
    return Status::failure(StatusCode::capability, "keys and values must be f32, f16 or bf16");
  }
  if (b.kv_heads <= 0 || b.head_dim <= 0 || b.block_tokens <= 0) {
    return invalid("kv heads (" + text(b.kv_heads) + "), head dimension (" + text(b.head_dim) +
                   ") and tokens of a block (" + text(b.block_tokens) + ") must be positive");
  }
  return Status::success();
}

Status validate_sizes(const PagedAttentionArguments& a) {
  Status status = validate_sizes(static_cast<const PagedBatch&>(a));
  if (!status.ok()) return status;
  if (!is_float(a.query_dtype) || !is_float(a.output_dtype)) {
    return Status::failure(StatusCode::capability, "queries and outputs must be f32, f16 or bf16");
  }
  if (a.query_heads <= 0 || a.query_heads % a.kv_heads != 0) {
    return invalid("the query heads (" + text(a.query_heads) + ") must be a multiple of the kv heads (" +
                   text(a.kv_heads) + ")");
  }
  return Status::success();
}

Status validate_rows(const PagedBatch& b) {
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    const int32_t first = b.query_start[entry];
    const int32_t last = b.query_start[entry + 1];
    if (first < 0 || last < first || last > b.query_tokens) {
      return invalid("batch entry " + text(entry) + " has the rows " + text(first) + " to " + text(last) +
                     ", but rows must ascend from 0 to at most " + text(b.query_tokens));
    }
    if (b.slots[entry] < 0 || b.slots[entry] >= b.slot_count) {
      return invalid("batch entry " + text(entry) + " names slot " + text(b.slots[entry]) +
                     ", but slots are 0 to " + text(b.slot_count - 1));
    }
  }
  return Status::success();
}

Status validate_tables(const PagedBatch& b, bool appending) {
  Status status = validate_rows(b);
  if (!status.ok()) return status;
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    const int32_t rows = b.query_start[entry + 1] - b.query_start[entry];
    if (rows == 0) continue;
    for (int32_t head = 0; head < b.kv_heads; ++head) {
      const int64_t count = b.key_counts[int64_t{b.slots[entry]} * b.kv_heads + head];
      status = appending ? validate_head(b, entry, head, count, count + rows) : validate_head(b, entry, head, 0, count);
      if (!status.ok()) return status;
    }
  }
  return Status::success();
}

Status validate_counts(const PagedBatch& b) {
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    if (b.query_start[entry] == b.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < b.kv_heads; ++head) {
      const int64_t count = b.key_counts[int64_t{b.slots[entry]} * b.kv_heads + head];
      const Status status = validate_capacity(b, entry, head, count);
      if (!status.ok()) return status;
    }
  }
  return Status::success();
}

Status validate_whole_blocks(const PagedBatch& b) {
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    if (b.query_start[entry] == b.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < b.kv_heads; ++head) {
      const int32_t count = b.key_counts[int64_t{b.slots[entry]} * b.kv_heads + head];
      if (count % b.block_tokens == 0) continue;
      return invalid("slot " + text(b.slots[entry]) + ", kv head " + text(head) + " counts " + text(count) +
                     " keys, but blocks in codes hold " + text(b.block_tokens) + " each: give a multiple of it");
    }
  }
  return Status::success();
}

int32_t most_keys(const PagedBatch& b) {
  int32_t most = 0;
  for (int32_t entry = 0; entry < b.batch; ++entry) {
    if (b.query_start[entry] == b.query_start[entry + 1]) continue;
    const int32_t* counts = b.key_counts + int64_t{b.slots[entry]} * b.kv_heads;
    for (int32_t head = 0; head < b.kv_heads; ++head) most = std::max(most, counts[head]);
  }
  return most;
}

}  // namespace kv
