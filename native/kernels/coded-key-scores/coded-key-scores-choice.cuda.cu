// Which kernel a CUDA device computes scores from codes with.
#include "kernels/coded-key-scores/coded-key-scores.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {

Status coded_key_scores_cuda(const CodedKeyScoresArguments& a, ExecutionContext& context) {
  if (a.batch == 0 || a.query_tokens == 0) return Status::success();
  const FaultSink faults = context.faults(describe_paged_fault);
  return cuda::fits_coded_key_scores(a) ? cuda::coded_key_scores(a, faults, stream_of(context))
                                        : cuda::coded_key_scores_any(a, faults, stream_of(context));
}

}  // namespace kv
