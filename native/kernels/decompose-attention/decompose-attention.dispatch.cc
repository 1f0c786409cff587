#include "kernels/decompose-attention/decompose-attention.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

Status check_sizes(const DecomposeAttentionArguments& a) {
  const Status status = validate_sizes(a);
  if (!status.ok()) return status;
  if (a.pairs <= 0 || 2 * a.pairs > a.head_dim) return invalid("there must be 1 to dim / 2 frequencies");
  if (a.rows <= 0 || a.rows > a.tokens) return invalid("there must be 1 row or more, and no fewer tokens");
  if (a.seen_tokens < 0 || a.seen_tokens > a.tokens - a.rows) {
    return invalid(std::to_string(a.seen_tokens) + " tokens have been seen, but " + std::to_string(a.tokens - a.rows) +
                   " are before the rows");
  }
  if (a.state_values != DecompositionState(a).values() || reinterpret_cast<uintptr_t>(a.state) % sizeof(double) != 0) {
    return invalid("the state must be " + std::to_string(DecompositionState(a).values()) + " aligned values of 8 bytes");
  }
  return Status::success();
}

std::string miscounts(int64_t head, int64_t count, int64_t wanted) {
  if (head < 0) {
    return "the entry has " + std::to_string(count) + " rows, but there is room for " + std::to_string(wanted);
  }
  return "kv head " + std::to_string(head) + " holds " + std::to_string(count) + " keys, but there is room for " +
         std::to_string(wanted);
}

// Checks that there are as many rows and keys as the outputs have room for. The tables must be valid.
Status check_counts(const DecomposeAttentionArguments& a) {
  const int32_t rows = a.query_start[1] - a.query_start[0];
  if (rows != a.rows) return invalid(miscounts(-1, rows, a.rows));
  for (int32_t head = 0; head < a.kv_heads; ++head) {
    const int32_t count = a.key_counts[int64_t{a.slots[0]} * a.kv_heads + head];
    if (count != a.tokens) return invalid(miscounts(head, count, a.tokens));
  }
  return Status::success();
}

}  // namespace

std::string describe_decompose_attention_fault(const Fault& fault) {
  const bool counts = fault.code == static_cast<int32_t>(DecomposeAttentionFault::other_count);
  return counts ? miscounts(fault.row, fault.value, fault.limit) : describe_paged_fault(fault);
}

KV_CPU_KERNEL(decompose_attention, DecomposeAttentionArguments)
KV_CUDA_KERNEL(decompose_attention, DecomposeAttentionArguments)

Status decompose_attention(const DecomposeAttentionArguments& arguments, ExecutionContext& context) {
  Status status = check_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decompose_attention_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = check_counts(arguments);
  if (status.ok()) decompose_attention_cpu(arguments, context);
  return status;
}

}  // namespace kv
