// Which kernel a CUDA device computes mixed decode attention with.
#include "kernels/cuda-elements.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/mixed-blocks.cuda.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention.cuda.h"
#include "runtime/device.h"

namespace kv {

Status mixed_decode_attention_cuda(const MixedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  if (!fits_mixed_decode(given)) {
    return Status::failure(StatusCode::capability,
                           "decode over sparse blocks on CUDA takes queries, cache and outputs of one 16-bit dtype, "
                           "whose rows begin at multiples of 16 bytes");
  }
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  const bool dense = !given.has_sparse_keys && !given.has_sparse_values;
  MixedDecodeMemory memory{};
  cuda::DecodeAttentionMemory dense_memory{};
  Status status = mixed_decode_memory(given, &memory);
  if (status.ok()) status = cuda::decode_attention_memory(given, &dense_memory);
  if (!status.ok()) return status;
  if (dense) memory = {dense_memory.counter_bytes, dense_memory.workspace_bytes};
  void* counters = context.queue->zeroed_workspace(memory.counter_bytes);
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* checked = static_cast<char*>(context.queue->workspace(tables_bytes + memory.workspace_bytes));
  if (counters == nullptr || checked == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for mixed decode attention's workspace");
  }
  const CheckedTables tables(given, checked);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const MixedAttentionArguments arguments = with_tables(given, tables);
  void* workspace = checked + tables_bytes;
  cudaStream_t stream = stream_of(context);
  if (dense) {
    return cuda::decode_attention(as_plain_cache(arguments), arguments.value_table, counters, workspace, context.faults,
                                  stream);
  }
  return major == 9 ? sm90a::mixed_decode_attention(arguments, counters, workspace, stream)
                    : sm80::mixed_decode_attention(arguments, counters, workspace, stream);
}

}  // namespace kv
