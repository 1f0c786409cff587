#include "kernels/index-centroids/index-centroids.h"

#include <string>

#include "runtime/device.h"
#include "shared/coded-keys/coded-keys.h"
#include "shared/dispatch/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(index_centroids, IndexCentroidsArguments)

namespace {

Status validate_finite(const IndexCentroidsArguments& a) {
  const int64_t numbers = a.books * a.centroid_count * a.sub_dim;
  for (int64_t i = 0; i < numbers; ++i) {
    if ((a.centroids[i] & 0x7c00) != 0x7c00) continue;
    return Status::failure(StatusCode::invalid_value, "number " + std::to_string(i) +
                                                          " of the centroids is not finite: train the codebooks on finite keys");
  }
  return Status::success();
}

}  // namespace

Status index_centroids(const IndexCentroidsArguments& arguments, ExecutionContext& context) {
  if (arguments.centroid_count < 1 || arguments.centroid_count > kMostCentroids) {
    return Status::failure(StatusCode::capability, "a book has 1 to " + std::to_string(kMostCentroids) + " centroids, not " +
                                                       std::to_string(arguments.centroid_count));
  }
  const auto part = [arguments](HostContext& host) {
    const Status status = validate_finite(arguments);
    if (!status.ok()) return status;
    ExecutionContext here{host.workers};
    here.isa = host.isa;
    index_centroids_cpu(arguments, here);
    return Status::success();
  };
  return context.queue->run_on_host(part, context);
}

}  // namespace kv
