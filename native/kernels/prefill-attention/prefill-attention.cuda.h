// Launchers of prefill attention on CUDA devices. They validate what the host can see, enqueue on `stream`
// and return; faults of the kernel itself surface on the stream. `block_table` of the arguments names the blocks of
// keys, `value_table`, of the same shape and often the same, those of values.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Device memory that a launch needs, to hand out its work. Its content does not matter. Launches that may run
// at the same time need one each.
constexpr size_t kPrefillAttentionWorkspaceBytes = 16;

// A block's tokens come in multiples of this.
constexpr int kPrefillBlockMultiple = 8;

namespace sm90a {

// Takes what fits_tensor_cores(arguments, kPrefillBlockMultiple) accepts; refuses the rest (capability).
Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* workspace,
                         cudaStream_t stream);

}  // namespace sm90a

namespace sm80 {

// Takes what fits_tensor_cores(arguments, 1) accepts; refuses the rest (capability). Needs no workspace.
Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, cudaStream_t stream);

}  // namespace sm80
}  // namespace kv
