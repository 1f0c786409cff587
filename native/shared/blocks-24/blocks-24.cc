#include "shared/blocks-24/blocks-24.h"

#include <string>

namespace kv {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

struct Table {
  const char* name;
  const int32_t* entries;
  int32_t sparse_count;
  bool may_be_sparse;
};

// Checks the first `count` keys of one row of an index map.
Status validate_row(const Attention24Arguments& a, const Table& table, int64_t row, int64_t count) {
  for (int64_t key = 0; key < count; key += kBlock24Tokens) {
    const int32_t entry = table.entries[row * a.table_width + key / kBlock24Tokens];
    const bool full = key + kBlock24Tokens <= count;
    const int32_t sparse_count = table.may_be_sparse && full ? table.sparse_count : 0;
    if (names_dense(entry, a.block_count) || names_block(entry, BlockKind::sparse_24, sparse_count)) continue;
    return invalid(std::string("the map of the ") + table.name + " has " + text(entry) + " for key " + text(key) +
                   " of " + text(count) + "; it may name the first " + text(a.block_count) + " dense blocks here, and the first " +
                   text(sparse_count) + " 2:4 blocks");
  }
  return Status::success();
}

}  // namespace

Status validate_block_format(DType dtype, int32_t head_dim) {
  if (dtype != DType::f16 && dtype != DType::bf16) {
    return Status::failure(StatusCode::capability, "blocks that may be sparse must be f16 or bf16");
  }
  if (head_dim != 64 && head_dim != 128) {
    return Status::failure(StatusCode::capability,
                           "blocks that may be sparse have 64 or 128 dims, not " + text(head_dim));
  }
  return Status::success();
}

Status validate_block_memory(std::initializer_list<const void*> memory) {
  for (const void* data : memory) {
    if (reinterpret_cast<uintptr_t>(data) % 16 == 0) continue;
    return Status::failure(StatusCode::capability,
                           "blocks and masks begin at a multiple of 16 bytes; copy them into a tensor of their own");
  }
  return Status::success();
}

Status validate_sizes(const Attention24Arguments& a) {
  Status status = validate_sizes(static_cast<const PagedAttentionArguments&>(a));
  if (!status.ok()) return status;
  if (a.block_tokens != kBlock24Tokens) {
    return Status::failure(StatusCode::capability,
                           "blocks that may be sparse have 64 tokens, not " + text(a.block_tokens));
  }
  return validate_block_format(a.cache_dtype, a.head_dim);
}

Status validate_tables(const Attention24Arguments& a) {
  const Table tables[] = {
      {"keys", a.block_table, a.sparse_keys.block_count, a.has_sparse_keys},
      {"values", a.value_table, a.sparse_values.block_count, a.has_sparse_values},
  };
  Status status = validate_rows(a);
  if (!status.ok()) return status;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry + 1] == a.query_start[entry]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int64_t row = int64_t{a.slots[entry]} * a.kv_heads + head;
      const int64_t count = a.key_counts[row];
      if (count < 0 || count > int64_t{a.table_width} * kBlock24Tokens) {
        return invalid("slot " + text(a.slots[entry]) + ", kv head " + text(head) + " counts " + text(count) +
                       " keys; its index map holds 0 to " + text(int64_t{a.table_width} * kBlock24Tokens));
      }
      for (const Table& table : tables) {
        status = validate_row(a, table, row, count);
        if (!status.ok()) return status;
      }
    }
  }
  return Status::success();
}

}  // namespace kv
