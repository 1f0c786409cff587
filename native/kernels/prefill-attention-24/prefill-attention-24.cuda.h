// Launchers of prefill attention over dense and 2:4 blocks on CUDA devices. They take queries, cache and outputs of
// the same 16-bit dtype, enqueue on `stream` and return. Faults of the kernel itself are reported through the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Device memory for a launch, which gives out work tiles with it. Its old content does not matter. Launches that may
// run at the same time need one each.
constexpr size_t kPrefill24WorkspaceBytes = 16;

namespace sm90a {

Status prefill_attention_24(const Attention24Arguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace sm90a

namespace sm80 {

// Needs no workspace.
Status prefill_attention_24(const Attention24Arguments& arguments, cudaStream_t stream);

}  // namespace sm80
}  // namespace kv
