// Launchers of prefill attention on CUDA devices. They validate what the host can see, enqueue on `stream`
// and return; faults of the kernel itself surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/paged-attention.h"
#include "runtime/status.h"

namespace kv {

// Device memory that a launch needs, to hand out its work. Its content does not matter. Launches that may run
// at the same time need one each.
constexpr size_t kPrefillAttentionWorkspaceBytes = 16;

namespace sm90a {

// f16 or bf16 queries, cache and output of one dtype; head_dim 64 or 128; block_tokens a multiple of 8.
Status prefill_attention(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace sm90a
}  // namespace kv
