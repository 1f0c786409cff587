#include "kernels/compress-24/compress-24.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

Status invalid(int32_t pruning, const std::string& problem) {
  return Status::failure(StatusCode::invalid_value, "pruning " + std::to_string(pruning) + " " + problem);
}

// Checks that an entry of `prunings` fits the map and the pools.
Status validate(const Compress24Arguments& a, int32_t index) {
  const Pruning& p = a.prunings[index];
  if (p.table_row < 0 || p.table_row >= int64_t{a.slot_count} * a.kv_heads) {
    return invalid(index, "names row " + std::to_string(p.table_row) + ", which the index map does not have");
  }
  if (p.first_block < 0 || p.end_block < p.first_block || p.end_block > a.table_width ||
      p.end_block - p.first_block > a.most_blocks) {
    return invalid(index, "has the blocks " + std::to_string(p.first_block) + " to " + std::to_string(p.end_block) +
                              "; a row of the index map has " + std::to_string(a.table_width));
  }
  int32_t dense = 0;
  int32_t freed = 0;
  for (int32_t block = p.first_block; block < p.end_block; ++block) {
    const int32_t entry = a.table[int64_t{p.table_row} * a.table_width + block];
    if (!is_dense(entry)) continue;
    if (entry >= a.dense_block_count) {
      return invalid(index, "finds dense block " + std::to_string(entry) + ", which the pool does not have");
    }
    dense += 1;
    freed += entry >= p.freed_from ? 1 : 0;
  }
  if (p.count < 0 || p.count > dense || freed != p.count) {
    return invalid(index, "makes " + std::to_string(p.count) + " blocks sparse and frees " + std::to_string(freed) +
                              "; its range has " + std::to_string(dense) + " dense ones");
  }
  if (p.first_id < 0 || p.first_id > a.id_count - p.count) {
    return invalid(index, "takes ids from " + std::to_string(p.first_id) + " on; there are " +
                              std::to_string(a.id_count));
  }
  for (int32_t i = p.first_id; i < p.first_id + p.count; ++i) {
    if (a.ids[i] < 0 || a.ids[i] >= a.sparse_block_count) {
      return invalid(index, "is given sparse block " + std::to_string(a.ids[i]) + ", which the pool does not have");
    }
  }
  return Status::success();
}

}  // namespace

std::string describe_compress_24_fault(const Fault& fault) {
  const std::string pruning = "pruning " + std::to_string(fault.row);
  switch (static_cast<Compress24Fault>(fault.code)) {
    case Compress24Fault::row_out_of_range:
      return pruning + " names row " + std::to_string(fault.value) + ", which the index map does not have";
    case Compress24Fault::pruning_out_of_range:
      return pruning + " asks for " + std::to_string(fault.value) + " of " + std::to_string(fault.limit) +
             ", or for a range, ids or freed blocks that do not fit them";
    default:
      return describe_paged_fault(fault);
  }
}

KV_CPU_KERNEL(compress_24, Compress24Arguments)
KV_CUDA_KERNEL(compress_24, Compress24Arguments)

Status compress_24(const Compress24Arguments& arguments, ExecutionContext& context) {
  Status status = validate_block_format(arguments.dtype, arguments.head_dim);
  if (!status.ok()) return status;
  status = validate_block_memory({arguments.dense, arguments.non_zeros, arguments.metadata, arguments.element_mask});
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return compress_24_cuda(arguments, context);
  for (int32_t p = 0; p < arguments.pruning_count; ++p) {
    status = validate(arguments, p);
    if (!status.ok()) return status;
  }
  compress_24_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
