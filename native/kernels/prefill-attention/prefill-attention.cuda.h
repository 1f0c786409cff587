// Launchers of prefill attention on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return. Faults of the kernel itself are reported through the stream. `block_table` of the arguments names the
// blocks of keys. `value_table` names those of values; it has the same shape, and is often the same table.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Device memory for a launch, which gives out work tiles with it. Its old content does not matter. Launches that may
// run at the same time need one each.
constexpr size_t kPrefillAttentionWorkspaceBytes = 16;

// The tokens of a block must be a multiple of this.
constexpr int kPrefillBlockMultiple = 8;

namespace sm90a {

// Takes what fits_tensor_cores(arguments, kPrefillBlockMultiple) accepts and refuses the rest (capability).
Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
                         cudaStream_t stream);

}  // namespace sm90a

namespace sm80 {

// Takes what fits_tensor_cores(arguments, 1) accepts and refuses the rest (capability). Needs no workspace.
Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, cudaStream_t stream);

}  // namespace sm80
}  // namespace kv
