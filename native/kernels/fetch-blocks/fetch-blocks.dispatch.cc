#include "kernels/fetch-blocks/fetch-blocks.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(fetch_blocks, FetchBlocksArguments)
KV_CUDA_KERNEL(fetch_blocks, FetchBlocksArguments)

std::string describe_fetch_blocks_fault(const Fault& fault) {
  if (static_cast<FetchBlocksFault>(fault.code) == FetchBlocksFault::count_out_of_range) {
    return "there are " + std::to_string(fault.value) + " loads, and the list has room for " + std::to_string(fault.limit);
  }
  return "load " + std::to_string(fault.value) + " names a block that its pool does not have";
}

static Status invalid(FetchBlocksFault code, int64_t value, int64_t limit) {
  Fault fault;
  fault.code = static_cast<int32_t>(code);
  fault.value = value;
  fault.limit = limit;
  return Status::failure(StatusCode::invalid_value, describe_fetch_blocks_fault(fault));
}

Status fetch_blocks(const FetchBlocksArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return fetch_blocks_cuda(arguments, context);
  const int32_t count = arguments.load_count[0];
  if (count < 0 || count > arguments.most_loads) return invalid(FetchBlocksFault::count_out_of_range, count, arguments.most_loads);
  for (int32_t i = 0; i < count; ++i) {
    if (!arguments.names_blocks(i)) return invalid(FetchBlocksFault::block_out_of_range, i, count);
  }
  fetch_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
