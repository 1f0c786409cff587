// Which kernel a CUDA device computes prefill attention over 2:4 blocks with.
#include "kernels/prefill-attention-24/prefill-attention-24.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/blocks-24/blocks-24.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

bool fits(const Attention24Arguments& arguments) {
  for (const SparseBlocks24& blocks : {arguments.sparse_keys, arguments.sparse_values}) {
    const auto places = reinterpret_cast<uintptr_t>(blocks.non_zeros) | reinterpret_cast<uintptr_t>(blocks.metadata);
    if (places % 16 != 0) return false;
  }
  return fits_tensor_cores(arguments, kPrefillBlockMultiple);
}

Status attend_densely(const Attention24Arguments& arguments, bool hopper, void* workspace, cudaStream_t stream) {
  return hopper ? sm90a::prefill_attention(arguments, arguments.value_table, workspace, stream)
                : sm80::prefill_attention(arguments, arguments.value_table, stream);
}

}  // namespace

Status prefill_attention_24_cuda(const Attention24Arguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  const bool hopper = major == 9;
  if (!hopper && major != 8) {
    return Status::failure(StatusCode::capability,
                           "attention over sparse blocks is built for Ampere, Ada and Hopper; this device has compute "
                           "capability " +
                               std::to_string(major) + ": use the CPU");
  }
  if (!fits(given)) {
    return Status::failure(StatusCode::capability,
                           "attention over sparse blocks on CUDA takes queries, cache and outputs of one 16-bit dtype, "
                           "whose rows begin at multiples of 16 bytes, and a positive scale");
  }
  static_assert(kPrefill24WorkspaceBytes == kPrefillAttentionWorkspaceBytes);
  const size_t tables_bytes = checked_tables_bytes(given);
  auto* memory = static_cast<char*>(context.workspace(tables_bytes + kPrefill24WorkspaceBytes));
  if (memory == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for prefill attention over 2:4 blocks's workspace");
  }
  const CheckedTables tables(given, memory);
  const Status status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  const Attention24Arguments arguments = with_tables(given, tables);
  void* workspace = memory + tables_bytes;
  const cudaStream_t stream = stream_of(context);
  if (!given.has_sparse_keys && !given.has_sparse_values) return attend_densely(arguments, hopper, workspace, stream);
  return hopper ? sm90a::prefill_attention_24(arguments, workspace, stream)
                : sm80::prefill_attention_24(arguments, stream);
}

}  // namespace kv
