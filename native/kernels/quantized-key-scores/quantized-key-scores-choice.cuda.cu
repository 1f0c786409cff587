// Which kernel a CUDA device computes scores from quantized blocks with.
#include "kernels/quantized-key-scores/quantized-key-scores.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {

Status quantized_key_scores_cuda(const QuantizedKeyScoresArguments& a, ExecutionContext& context) {
  if (a.batch == 0 || a.query_tokens == 0) return Status::success();
  const FaultSink faults = context.faults(describe_paged_fault);
  return cuda::fits_quantized_key_scores(a) ? cuda::quantized_key_scores(a, faults, stream_of(context))
                                            : cuda::quantized_key_scores_any(a, faults, stream_of(context));
}

}  // namespace kv
