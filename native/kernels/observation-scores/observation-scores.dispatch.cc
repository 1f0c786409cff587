#include "kernels/observation-scores/observation-scores.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

Status check_sizes(const ObservationScoresArguments& a) {
  Status status = validate_sizes(a);
  if (!status.ok()) return status;
  if (!is_float(a.query_dtype)) {
    return Status::failure(StatusCode::capability, "queries must be f32, f16 or bf16");
  }
  if (a.query_heads <= 0 || a.query_heads % a.kv_heads != 0) {
    return invalid("the query heads (" + std::to_string(a.query_heads) +
                   ") must be a multiple of the kv heads (" + std::to_string(a.kv_heads) + ")");
  }
  if (!(a.scale > 0)) return invalid("the scale must be positive");
  return Status::success();
}

std::string lacks_room(int64_t head, int64_t prefix, int64_t room) {
  return "kv head " + std::to_string(head) + " has " + std::to_string(prefix) +
         " keys before the window, but there is room for " + std::to_string(room) + " scores";
}

// Checks that the scores have room for every prefix. The tables must be valid.
Status check_room(const ObservationScoresArguments& a) {
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    const int32_t queries = a.query_start[entry + 1] - a.query_start[entry];
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int32_t prefix = a.key_counts[int64_t{a.slots[entry]} * a.kv_heads + head] - queries;
      if (prefix > a.score_tokens) {
        return invalid("slot " + std::to_string(a.slots[entry]) + ", " + lacks_room(head, prefix, a.score_tokens));
      }
    }
  }
  return Status::success();
}

}  // namespace

std::string describe_observation_scores_fault(const Fault& fault) {
  const bool room = fault.code == static_cast<int32_t>(ObservationScoresFault::too_many_scores);
  return room ? lacks_room(fault.row, fault.value, fault.limit) : describe_paged_fault(fault);
}

KV_CPU_KERNEL(observation_scores, ObservationScoresArguments)
KV_CUDA_KERNEL(observation_scores, ObservationScoresArguments)

Status observation_scores(const ObservationScoresArguments& arguments, ExecutionContext& context) {
  Status status = check_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return observation_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = check_room(arguments);
  if (status.ok()) observation_scores_cpu(arguments, context);
  return status;
}

}  // namespace kv
