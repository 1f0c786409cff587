// Which kernel a CUDA device computes decode attention with.
#include "kernels/attention-tensor-cores.h"
#include "kernels/cuda-elements.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/paged-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention-any.h"
#include "runtime/device.h"

namespace kv {

Status decode_attention_cuda(const PagedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  const bool fits = fits_tensor_cores(given, kDecodeBlockMultiple);
  cuda::DecodeAttentionMemory memory{};
  Status status;
  if (fits) status = cuda::decode_attention_memory(given, &memory);
  if (!status.ok()) return status;
  void* counters = fits ? context.queue->zeroed_workspace(memory.counter_bytes) : nullptr;
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* workspace = static_cast<char*>(context.queue->workspace(tables_bytes + memory.workspace_bytes));
  if ((fits && counters == nullptr) || workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for decode attention's workspace");
  }
  const CheckedTables tables(given, workspace);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const PagedAttentionArguments arguments = with_tables(given, tables);
  if (!fits) return attention_any_cuda(arguments, context);
  return cuda::decode_attention(arguments, arguments.block_table, counters, workspace + tables_bytes,
                                stream_of(context));
}

}  // namespace kv
