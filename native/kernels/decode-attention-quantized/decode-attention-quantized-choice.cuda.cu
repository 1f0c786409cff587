// Which kernel a CUDA device computes decode attention over quantized blocks with.
#include "kernels/decode-attention-quantized/decode-attention-quantized.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {
namespace {

Status no_room() {
  return Status::failure(StatusCode::out_of_memory, "no room for decode attention's workspace over quantized blocks");
}

Status decode_any(const QuantizedAttentionArguments& given, ExecutionContext& context) {
  void* workspace = context.workspace(checked_tables_bytes(given));
  if (workspace == nullptr) return no_room();
  const CheckedTables tables(given, workspace);
  const Status status = check_tables_cuda(given, tables, context, false, true);
  return status.ok() ? cuda::decode_attention_quantized_any(with_tables(given, tables), stream_of(context)) : status;
}

}  // namespace

Status decode_attention_quantized_cuda(const QuantizedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  if (!cuda::fits_decode_attention_quantized(given)) return decode_any(given, context);
  DecodeAttentionMemory memory{};
  const Status status = cuda::decode_attention_quantized_memory(given, &memory);
  if (!status.ok()) return status;
  void* counters = context.zeroed_workspace(memory.counter_bytes);
  void* workspace = context.workspace(memory.workspace_bytes);
  if (counters == nullptr || workspace == nullptr) return no_room();
  return cuda::decode_attention_quantized(given, counters, workspace, context.faults(describe_paged_fault),
                                          stream_of(context));
}

}  // namespace kv
