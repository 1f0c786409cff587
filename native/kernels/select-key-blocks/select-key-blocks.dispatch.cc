#include "kernels/select-key-blocks/select-key-blocks.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

Status check_sizes(const SelectKeyBlocksArguments& a) {
  const auto invalid = [](const std::string& message) { return Status::failure(StatusCode::invalid_value, message); };
  const bool parts = a.slash != nullptr || a.vertical != nullptr || a.horizontal != nullptr;
  const bool whole = a.slash != nullptr && a.vertical != nullptr && a.horizontal != nullptr;
  if (parts && (!whole || a.scores != nullptr)) return invalid("there must be scores, or all three parts of an estimate, or neither");
  if (a.scores == nullptr && (a.rule == BlockRule::mass || a.rule == BlockRule::of_max)) {
    return invalid("there are no masses without scores; give scores, or another rule");
  }
  if (a.query_heads <= 0 || a.rows <= 0 || a.rows > a.tokens) {
    return invalid("there must be a head and a row or more, and no fewer tokens");
  }
  if (a.tile_rows <= 0 || a.tile_rows % kSelectedBlockTokens != 0) {
    return invalid("a tile has " + std::to_string(a.tile_rows) + " rows; give a multiple of 64");
  }
  const int64_t blocks = (int64_t{a.tokens} + kSelectedBlockTokens - 1) / kSelectedBlockTokens;
  if (a.capacity < blocks) {
    return invalid("there is room for " + std::to_string(a.capacity) + " blocks a tile, but there are " + std::to_string(blocks));
  }
  return Status::success();
}

}  // namespace

KV_CPU_KERNEL(select_key_blocks, SelectKeyBlocksArguments)
KV_CUDA_KERNEL(select_key_blocks, SelectKeyBlocksArguments)

Status select_key_blocks(const SelectKeyBlocksArguments& arguments, ExecutionContext& context) {
  const Status status = check_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return select_key_blocks_cuda(arguments, context);
  select_key_blocks_cpu(arguments, context);
  return status;
}

}  // namespace kv
