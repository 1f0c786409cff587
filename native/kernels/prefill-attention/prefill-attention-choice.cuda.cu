// Which kernel a CUDA device computes prefill attention with.
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {

Status prefill_attention_cuda(const PagedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* memory = static_cast<char*>(context.workspace(tables_bytes + kPrefillAttentionWorkspaceBytes));
  if (memory == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for prefill attention's workspace");
  }
  const CheckedTables tables(given, memory);
  const Status status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const PagedAttentionArguments arguments = with_tables(given, tables);
  const bool ampere_or_ada = major == 8;
  if (ampere_or_ada && fits_tensor_cores(arguments, 1)) {
    return sm80::prefill_attention(arguments, arguments.block_table, stream_of(context));
  }
  const bool hopper = major == 9;
  if (!hopper || !fits_tensor_cores(arguments, kPrefillBlockMultiple)) {
    return attention_any_cuda(arguments, context);
  }
  return sm90a::prefill_attention(arguments, arguments.block_table, memory + tables_bytes, stream_of(context));
}

}  // namespace kv
