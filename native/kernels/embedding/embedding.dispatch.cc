#include "kernels/embedding/embedding.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(embedding, EmbeddingArguments)
KV_CUDA_KERNEL(embedding, EmbeddingArguments)

static std::string leads_outside(int64_t token, int64_t row, int64_t rows) {
  return "ids[" + std::to_string(token) + "] is " + std::to_string(row) + "; the table has " + std::to_string(rows) +
         " rows, numbered from 0";
}

std::string describe_embedding_fault(const Fault& fault) { return leads_outside(fault.row, fault.value, fault.limit); }

static Status validate_ids(const EmbeddingArguments& a) {
  for (int64_t token = 0; token < a.tokens; ++token) {
    const int64_t row = row_of(a, token);
    if (row >= 0 && row < a.rows) continue;
    return Status::failure(StatusCode::invalid_value, leads_outside(token, row, a.rows));
  }
  return Status::success();
}

Status embedding(const EmbeddingArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return embedding_cuda(arguments, context);
  if (!arguments.nan_outside) {
    const Status status = validate_ids(arguments);
    if (!status.ok()) return status;
  }
  embedding_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
