// Launcher of decode attention on CUDA devices. It validates what the host can see, enqueues on `stream` and
// returns; faults of the kernel itself surface on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/paged-attention.h"
#include "runtime/status.h"

namespace kv::cuda {

// Device memory that a launch needs, for partial results. Its content does not matter. Launches that may run
// at the same time need one each.
Status decode_attention_workspace_bytes(const PagedAttentionArguments& arguments, size_t* bytes);

// One query for each batch entry, in row query_start[entry]; it sees all keys of its slot. f16 or bf16
// queries, cache and output of one dtype; head_dim 64 or 128; block_tokens a multiple of 16.
Status decode_attention(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace kv::cuda
