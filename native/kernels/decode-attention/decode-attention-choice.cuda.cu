// Which kernel a CUDA device computes decode attention with.
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {
namespace {

Status no_room() {
  return Status::failure(StatusCode::out_of_memory, "no room for decode attention's workspace");
}

Status decode_attention_any(const PagedAttentionArguments& given, ExecutionContext& context) {
  void* workspace = context.workspace(checked_tables_bytes(given));
  if (workspace == nullptr) return no_room();
  const CheckedTables tables(given, workspace);
  const Status status = check_tables_cuda(given, tables, context);
  return status.ok() ? attention_any_cuda(with_tables(given, tables), context) : status;
}

}  // namespace

Status decode_attention_cuda(const PagedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  if (!fits_tensor_cores(given, kDecodeBlockMultiple)) return decode_attention_any(given, context);
  DecodeAttentionMemory memory{};
  const Status status = cuda::decode_attention_memory(given, &memory);
  if (!status.ok()) return status;
  void* counters = context.zeroed_workspace(memory.counter_bytes);
  void* workspace = context.workspace(memory.workspace_bytes);
  if (counters == nullptr || workspace == nullptr) return no_room();
  return cuda::decode_attention(given, given.block_table, counters, workspace, context.faults(describe_paged_fault),
                                stream_of(context));
}

}  // namespace kv
