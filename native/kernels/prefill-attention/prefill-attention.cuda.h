// Launchers of prefill attention on CUDA devices. They validate what the host can see, enqueue on `stream` and
// return; faults of the kernel itself surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/paged-attention.h"
#include "runtime/status.h"

namespace kv {

// The kernel hands out its work through this much device memory. The caller zeroes it once; every launch leaves
// it zeroed. Launches that may run at the same time need one each.
constexpr size_t kPrefillAttentionWorkspaceBytes = 8;

namespace sm90a {

// f16 or bf16 queries, cache and output of one dtype; head_dim 64 or 128; block_tokens a multiple of 8.
Status prefill_attention(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace sm90a
}  // namespace kv
