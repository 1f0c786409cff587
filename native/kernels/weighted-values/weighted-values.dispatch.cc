#include "kernels/weighted-values/weighted-values.h"

#include "runtime/device.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/row-lists/run-over-lists.h"

namespace kv {

KV_CPU_KERNEL(weighted_values, WeightedValuesArguments)

Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context) {
  const auto part = [a = arguments](HostContext& host) mutable {
    return run_over_lists(a, host, [&a](int64_t* list_outside, ExecutionContext& on_host) {
      a.list_outside = list_outside;
      weighted_values_cpu(a, on_host);
    });
  };
  return context.queue->run_on_host(part, context);
}

}  // namespace kv
