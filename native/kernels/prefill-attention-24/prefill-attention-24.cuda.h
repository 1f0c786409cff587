// Launchers of prefill attention over dense and 2:4 blocks on CUDA devices. They take 16-bit queries, cache and outputs of one
// dtype, enqueue on `stream` and return; faults of the kernel itself surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Device memory that a launch needs, to hand out its work. Its content does not matter. Launches that may run at the
// same time need one each.
constexpr size_t kPrefill24WorkspaceBytes = 16;

namespace sm90a {

Status prefill_attention_24(const Attention24Arguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace sm90a

namespace sm80 {

// Needs no workspace.
Status prefill_attention_24(const Attention24Arguments& arguments, cudaStream_t stream);

}  // namespace sm80
}  // namespace kv
