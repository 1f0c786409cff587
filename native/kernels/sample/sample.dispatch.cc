#include "kernels/sample/sample.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(sample, SampleArguments)
KV_CUDA_KERNEL(sample, SampleArguments)

static std::string explain(int64_t row, const SampleOutcome& outcome, int64_t vocabulary) {
  const std::string place = "row " + std::to_string(row) + ": ";
  const std::string subject = std::to_string(outcome.subject);
  switch (outcome.fault) {
    case SampleFault::unordered_logit:
      return place + "the score of token " + subject + " is NaN or infinite; the model's output is broken";
    case SampleFault::no_finite_logit:
      return place + "every logit is -infinity; leave at least one token possible";
    default:
      return place + "recent token " + subject + " is not one of the " + std::to_string(vocabulary) + " of the model";
  }
}

std::string describe_sample_fault(const Fault& fault) {
  return explain(fault.row, {static_cast<SampleFault>(fault.code), fault.value}, fault.limit);
}

Status sample(const SampleArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return sample_cuda(arguments, context);
  SampleArguments a = arguments;
  const size_t detail_bytes = static_cast<size_t>(a.rows) * sizeof(SampleOutcome);
  a.details = static_cast<SampleOutcome*>(context.workers.shared_scratch(detail_bytes));
  sample_cpu(a, context);
  for (int64_t row = 0; row < a.rows; ++row) {
    const SampleOutcome& detail = a.details[row];
    if (a.outcomes != nullptr) {
      a.outcomes[row] = static_cast<int32_t>(detail.fault);
      if (detail.fault != SampleFault::none) a.output[row] = -1;
    } else if (detail.fault != SampleFault::none) {
      return Status::failure(StatusCode::invalid_value, explain(row, detail, a.vocabulary));
    }
  }
  return Status::success();
}

}  // namespace kv
