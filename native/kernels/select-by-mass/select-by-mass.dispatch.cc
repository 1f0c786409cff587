#include "kernels/select-by-mass/select-by-mass.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(select_by_mass, SelectByMassArguments)
KV_CUDA_KERNEL(select_by_mass, SelectByMassArguments)

namespace {

Status check_sizes(const SelectByMassArguments& a) {
  if (a.query_heads <= 0 || a.query_heads % a.kv_heads != 0) {
    return invalid("the query heads (" + std::to_string(a.query_heads) + ") must be a multiple of the kv heads (" +
                   std::to_string(a.kv_heads) + ")");
  }
  if (a.score_tokens > kMostScoredTokens) {
    return Status::failure(StatusCode::capability, "there are scores of " + std::to_string(a.score_tokens) +
                                                       " tokens; the sums have room for " +
                                                       std::to_string(kMostScoredTokens));
  }
  if (a.capacity < 1) return invalid("the lists have room for no token; give them room for one or more");
  if (!(a.tau > 0 && a.tau <= 1)) return invalid("tau is " + std::to_string(a.tau) + "; give a number above 0, at most 1");
  return Status::success();
}

Status check_heads(const SelectByMassArguments& a) {
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry] == a.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
      const std::string place = "slot " + std::to_string(a.slots[entry]) + ", kv head " + std::to_string(head);
      if (a.key_counts[cache_head] > a.score_tokens) {
        return invalid(place + " counts " + std::to_string(a.key_counts[cache_head]) + " tokens, and there are scores of " +
                       std::to_string(a.score_tokens));
      }
      if (a.missing != MissingMass::mean_value) continue;
      const int32_t mean = a.mean_rows[cache_head];
      if (mean >= int64_t{a.block_count} * kValueBlockTokens) {
        return invalid(place + " has its mean value in row " + std::to_string(mean) + " of " +
                       std::to_string(int64_t{a.block_count} * kValueBlockTokens));
      }
    }
  }
  return Status::success();
}

}  // namespace

std::string describe_select_by_mass_fault(const Fault& fault) {
  const std::string value = std::to_string(fault.value);
  const std::string limit = std::to_string(fault.limit);
  switch (static_cast<SelectByMassFault>(fault.code)) {
    case SelectByMassFault::too_many_keys:
      return "slot " + value + " counts more tokens than have scores, which " + limit + " have";
    case SelectByMassFault::mean_out_of_range:
      return "a mean value is in row " + value + ", and the pool has " + limit;
    default:
      return describe_paged_fault(fault);
  }
}

Status select_by_mass(const SelectByMassArguments& given, ExecutionContext& context) {
  SelectByMassArguments arguments = given;
  arguments.block_tokens = kValueBlockTokens;
  arguments.head_dim = 1;
  Status status = validate_sizes(arguments);
  if (status.ok()) status = check_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return select_by_mass_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = check_heads(arguments);
  if (status.ok()) select_by_mass_cpu(arguments, context);
  return status;
}

}  // namespace kv
