#include "kernels/place-blocks/place-blocks.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(place_blocks, PlaceBlocksArguments)
KV_CUDA_KERNEL(place_blocks, PlaceBlocksArguments)

Status place_blocks(const PlaceBlocksArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return place_blocks_cuda(arguments, context);
  const Status status = validate_tables(arguments, false);
  if (!status.ok()) return status;
  place_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
