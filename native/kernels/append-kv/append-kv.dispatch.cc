#include "kernels/append-kv/append-kv.h"

#include <string>
#include <vector>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(append_kv, AppendKvArguments)
KV_CUDA_KERNEL(append_kv, AppendKvArguments)

static std::string named_twice(int64_t slot) {
  return "slot " + std::to_string(slot) + " is named twice in one batch, by entries that both have rows";
}

std::string describe_append_kv_fault(const Fault& fault) {
  const bool twice = fault.code == static_cast<int32_t>(AppendKvFault::slot_twice);
  return twice ? named_twice(fault.value) : describe_paged_fault(fault);
}

// Refuses a slot that two entries name, because both would write after the same count. The slots must exist.
static Status validate_slots(const AppendKvArguments& a) {
  std::vector<bool> seen(static_cast<size_t>(a.slot_count));
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry + 1] == a.query_start[entry]) continue;
    const auto slot = static_cast<size_t>(a.slots[entry]);
    if (seen[slot]) {
      return Status::failure(StatusCode::invalid_value, named_twice(a.slots[entry]));
    }
    seen[slot] = true;
  }
  return Status::success();
}

// Heads that follow each other, as a projection leaves those of queries and keys, turn together.
Status turn_rows(const AppendKvArguments& a, ExecutionContext& context) {
  RopeArguments queries = a.turned_queries;
  const RopeArguments& keys = a.turned_keys;
  const auto* end = static_cast<const char*>(queries.input) +
                    queries.heads * queries.input_head_stride * static_cast<int64_t>(byte_size(queries.dtype));
  if (end == keys.input && queries.dtype == keys.dtype && queries.input_head_stride == keys.input_head_stride &&
      queries.input_token_stride == keys.input_token_stride) {
    queries.heads += keys.heads;
    return rope(queries, context);
  }
  const Status status = rope(queries, context);
  return status.ok() ? rope(keys, context) : status;
}

Status append_kv(const AppendKvArguments& arguments, ExecutionContext& context) {
  if (!is_float(arguments.row_dtype)) {
    return Status::failure(StatusCode::capability, "new keys and values must be f32, f16 or bf16");
  }
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return append_kv_cuda(arguments, context);
  status = validate_tables(arguments, true);
  if (status.ok()) status = validate_slots(arguments);
  if (status.ok() && arguments.turns) status = turn_rows(arguments, context);
  if (!status.ok()) return status;
  append_kv_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
