// Which kernel a CUDA device computes decode attention over 2:4 blocks with.
#include "kernels/decode-attention-24/decode-attention-24.cuda.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "shared/blocks-24/blocks-24.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {
namespace {

struct Memory {
  void* counters;
  char* workspace;
};

Status take_memory(ExecutionContext& context, size_t counter_bytes, size_t workspace_bytes, Memory* memory) {
  memory->counters = context.zeroed_workspace(counter_bytes);
  memory->workspace = static_cast<char*>(context.workspace(workspace_bytes));
  if (memory->counters != nullptr && memory->workspace != nullptr) return Status::success();
  return Status::failure(StatusCode::out_of_memory, "no room for decode attention over 2:4 blocks's workspace");
}

Status decode_dense_blocks(const Attention24Arguments& given, ExecutionContext& context) {
  DecodeAttentionMemory needed{};
  Status status = cuda::decode_attention_memory(given, &needed);
  if (!status.ok()) return status;
  const size_t tables_bytes = checked_tables_bytes(given);
  Memory memory{};
  status = take_memory(context, needed.counter_bytes, tables_bytes + needed.workspace_bytes, &memory);
  if (!status.ok()) return status;
  const CheckedTables tables(given, memory.workspace);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const Attention24Arguments arguments = with_tables(given, tables);
  return cuda::decode_attention(arguments, arguments.value_table, memory.counters,
                                memory.workspace + tables_bytes, context.faults(describe_paged_fault),
                                stream_of(context));
}

}  // namespace

Status decode_attention_24_cuda(const Attention24Arguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  if (!fits_decode_24(given)) {
    return Status::failure(StatusCode::capability,
                           "decode over sparse blocks on CUDA takes queries, cache and outputs of one 16-bit dtype, "
                           "whose rows begin at multiples of 16 bytes, and a positive scale");
  }
  if (!given.has_sparse_keys && !given.has_sparse_values) return decode_dense_blocks(given, context);
  int major = 0;
  Status status = find_compute_capability(major);
  DecodeMemory24 needed{};
  if (status.ok()) status = decode_24_memory(given, &needed);
  Memory memory{};
  if (status.ok()) status = take_memory(context, needed.counter_bytes, needed.workspace_bytes, &memory);
  if (!status.ok()) return status;
  const auto decode = major == 9 ? sm90a::decode_attention_24 : sm80::decode_attention_24;
  return decode(given, memory.counters, memory.workspace, context.faults(describe_paged_fault),
                                stream_of(context));
}

}  // namespace kv
