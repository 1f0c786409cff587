#include "kernels/block-metadata/block-metadata.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(block_metadata, BlockMetadataArguments)
KV_CUDA_KERNEL(block_metadata, BlockMetadataArguments)

// Checks where the metadata of filled blocks goes. The batch must be valid.
static Status validate_metadata_table(const BlockMetadataArguments& a) {
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    const int32_t rows = a.query_start[entry + 1] - a.query_start[entry];
    if (rows == 0) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
      const FilledBlocks filled(a.key_counts[cache_head], rows, a.block_tokens);
      for (int32_t block = filled.first; block < filled.end; ++block) {
        const int32_t described = a.metadata_table[cache_head * a.table_width + block];
        if (described >= 0 && described < a.metadata_blocks) continue;
        return Status::failure(StatusCode::invalid_value,
                               "slot " + std::to_string(a.slots[entry]) + " has metadata in block " + std::to_string(described) +
                                   ", but blocks are 0 to " + std::to_string(a.metadata_blocks - 1));
      }
    }
  }
  return Status::success();
}

Status block_metadata(const BlockMetadataArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok() || arguments.batch == 0) return status;
  if (context.device == DeviceKind::cuda) return block_metadata_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_metadata_table(arguments);
  if (!status.ok()) return status;
  block_metadata_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
