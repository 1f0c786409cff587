#include "kernels/weighted-values/weighted-values.h"

#include <string>

#include "runtime/device.h"
#include "shared/dispatch/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(weighted_values, WeightedValuesArguments)

namespace {

std::string place_of(const WeightedValuesArguments& a, int64_t list) {
  return "row " + std::to_string(list / a.kv_heads) + ", kv head " + std::to_string(list % a.kv_heads);
}

Status sum_on(HostContext& host, WeightedValuesArguments a) {
  const int64_t lists = int64_t{a.rows} * a.kv_heads;
  for (int64_t list = 0; list < lists; ++list) {
    if (a.counts[list] >= 0 && a.counts[list] <= a.capacity) continue;
    return Status::failure(StatusCode::invalid_value, place_of(a, list) + " has a list of " +
                                                          std::to_string(a.counts[list]) + " values, and there is room for " +
                                                          std::to_string(a.capacity));
  }
  int64_t outside = -1;
  a.list_outside = &outside;
  ExecutionContext context{host.workers};
  context.isa = host.isa;
  weighted_values_cpu(a, context);
  if (outside < 0) return Status::success();
  return Status::failure(StatusCode::invalid_value, place_of(a, outside) + " lists a value that is not among the " +
                                                        std::to_string(a.pool_rows) + " rows of the pool");
}

}  // namespace

Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context) {
  return context.queue->run_on_host([arguments](HostContext& host) { return sum_on(host, arguments); }, context);
}

}  // namespace kv
