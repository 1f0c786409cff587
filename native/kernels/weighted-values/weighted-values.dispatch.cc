#include "kernels/weighted-values/weighted-values.h"

#include <vector>

#include "runtime/device.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/row-lists/run-over-lists.h"

namespace kv {

KV_CPU_KERNEL(weighted_values, WeightedValuesArguments)
KV_CUDA_KERNEL(weighted_values, SharedValuesArguments)

namespace {

// Whether a device reads rows of values in whole vectors, and has kernels for as many query heads of a kv head.
bool suits_device(const WeightedValuesArguments& a) {
  const bool has_kernel = a.group == 1 || a.group == 2 || a.group == 4 || a.group == 8;
  return has_kernel && a.lists() > 0 && a.head_dim > 0 && a.head_dim % 4 == 0 && device_pieces(a.capacity, a.dtype) > 0;
}

Status sum_on_host(WeightedValuesArguments a, bool is_shared, HostContext& host) {
  return run_over_lists(a, host, [&](int64_t* list_outside, ExecutionContext& context) {
    std::vector<int32_t> counts(a.counts, a.counts + a.lists());
    if (is_shared) {
      for (int32_t& count : counts) count = host_rows(count, a.dtype);
    }
    a.counts = counts.data();
    a.list_outside = list_outside;
    weighted_values_cpu(a, context);
  });
}

}  // namespace

std::string describe_weighted_values_fault(const Fault& fault) {
  return "list " + std::to_string(fault.row) + " names row " + std::to_string(fault.value) +
         ", which is not among the " + std::to_string(fault.limit) + " rows of the pool";
}

Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context) {
  const bool is_cuda = context.device == DeviceKind::cuda;
  const bool is_shared = is_cuda && suits_device(arguments);
  const bool is_sent = is_cuda && arguments.room.value_rows != nullptr;
  WeightedValuesArguments of_host = arguments;
  if (is_sent) {
    of_host.value_rows = arguments.room.value_rows;
    of_host.counts = arguments.room.counts;
    of_host.weights = arguments.room.weights;
  }
  const auto part = [of_host, is_shared](HostContext& host) { return sum_on_host(of_host, is_shared, host); };
  if (is_shared || is_sent) return weighted_values_cuda({arguments, part, is_shared}, context);
  return context.queue->run_on_host(part, context);
}

}  // namespace kv
