// Which kernel a CUDA device computes mixed decode attention with.
#include "kernels/cuda-elements.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/mixed-blocks.cuda.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention.cuda.h"
#include "runtime/device.h"

namespace kv {
namespace {

struct Memory {
  void* counters;
  char* workspace;
};

Status take_memory(ExecutionContext& context, size_t counter_bytes, size_t workspace_bytes, Memory* memory) {
  memory->counters = context.queue->zeroed_workspace(counter_bytes);
  memory->workspace = static_cast<char*>(context.queue->workspace(workspace_bytes));
  if (memory->counters != nullptr && memory->workspace != nullptr) return Status::success();
  return Status::failure(StatusCode::out_of_memory, "no room for mixed decode attention's workspace");
}

Status decode_dense_blocks(const MixedAttentionArguments& given, ExecutionContext& context) {
  cuda::DecodeAttentionMemory needed{};
  Status status = cuda::decode_attention_memory(given, &needed);
  if (!status.ok()) return status;
  const size_t tables_bytes = checked_tables_bytes(given);
  Memory memory{};
  status = take_memory(context, needed.counter_bytes, tables_bytes + needed.workspace_bytes, &memory);
  if (!status.ok()) return status;
  const CheckedTables tables(given, memory.workspace);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const MixedAttentionArguments arguments = with_tables(given, tables);
  return cuda::decode_attention(as_plain_cache(arguments), arguments.value_table, memory.counters,
                                memory.workspace + tables_bytes, context.faults, stream_of(context));
}

}  // namespace

Status mixed_decode_attention_cuda(const MixedAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  if (!fits_mixed_decode(given)) {
    return Status::failure(StatusCode::capability,
                           "decode over sparse blocks on CUDA takes queries, cache and outputs of one 16-bit dtype, "
                           "whose rows begin at multiples of 16 bytes, and a positive scale");
  }
  if (!given.has_sparse_keys && !given.has_sparse_values) return decode_dense_blocks(given, context);
  int major = 0;
  Status status = find_compute_capability(major);
  MixedDecodeMemory needed{};
  if (status.ok()) status = mixed_decode_memory(given, &needed);
  Memory memory{};
  if (status.ok()) status = take_memory(context, needed.counter_bytes, needed.workspace_bytes, &memory);
  if (!status.ok()) return status;
  const auto decode = major == 9 ? sm90a::mixed_decode_attention : sm80::mixed_decode_attention;
  return decode(given, memory.counters, memory.workspace, context.faults, stream_of(context));
}

}  // namespace kv
