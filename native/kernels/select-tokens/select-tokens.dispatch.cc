#include "kernels/select-tokens/select-tokens.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

Status check_rounds(const SelectTokensArguments& a) {
  if (a.round_count < 1 || a.round_count > SelectTokensArguments::kMaxRounds) {
    return invalid("there are " + std::to_string(a.round_count) + " rounds; give 1 to " +
                   std::to_string(SelectTokensArguments::kMaxRounds));
  }
  for (int32_t round = 0; round < a.round_count; ++round) {
    if (a.rounds[round] < 1) {
      return invalid("round " + std::to_string(round) + " has " + std::to_string(a.rounds[round]) +
                     " groups; give it one or more");
    }
  }
  if (a.sink_tokens < 0) {
    return invalid("the sinks are " + std::to_string(a.sink_tokens) + " tokens; give 0 or more");
  }
  if (a.pool_tokens < 1 || a.pool_tokens % 2 == 0) {
    return invalid("scores are pooled over " + std::to_string(a.pool_tokens) + " tokens; give an odd number");
  }
  return Status::success();
}

Status check_rows(const SelectTokensArguments& a) {
  for (int32_t index = 0; index < a.row_count; ++index) {
    const SelectTokensRow& row = a.rows[index];
    const int64_t held = int64_t{row.prefix_tokens} + row.window_tokens;
    const int64_t wanted = row.capacity > row.window_tokens ? row.capacity : row.window_tokens;
    const int64_t kept = wanted < held ? wanted : held;
    const bool sane = row.prefix_tokens >= 0 && row.window_tokens >= 0 && row.capacity >= 0 && row.block_tokens >= 1;
    if (!sane || row.prefix_tokens > a.score_tokens || kept > a.index_tokens) {
      return invalid("row " + std::to_string(index) + " keeps " + std::to_string(kept) + " tokens of " +
                     std::to_string(row.prefix_tokens) + " with scores and a window of " +
                     std::to_string(row.window_tokens) + ", in blocks of " +
                     std::to_string(row.block_tokens) + "; there are " + std::to_string(a.score_tokens) +
                     " scores and room for " + std::to_string(a.index_tokens) + " indices a row");
    }
  }
  return Status::success();
}

}  // namespace

std::string describe_select_tokens_fault(const Fault& fault) {
  return "row " + std::to_string(fault.row) + ": its tokens or sizes contradict each other or exceed the scores or the " +
         std::to_string(fault.limit) + " indices that there is room for";
}

KV_CPU_KERNEL(select_tokens, SelectTokensArguments)
KV_CUDA_KERNEL(select_tokens, SelectTokensArguments)

Status select_tokens(const SelectTokensArguments& arguments, ExecutionContext& context) {
  Status status = check_rounds(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return select_tokens_cuda(arguments, context);
  status = check_rows(arguments);
  if (status.ok()) select_tokens_cpu(arguments, context);
  return status;
}

}  // namespace kv
